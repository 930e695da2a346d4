"""The exceptions a user is meant to see."""


class UserError(Exception):
    """Bad input (recipe, data, checkpoint, environment), said in one sentence.

    The message names the key or file, the value found, what is allowed and the cure. The command line prints it
    without a traceback and exits with code 2.
    """

    exit_code = 2


class StorageError(UserError):
    """A disk that is full, over quota, broken or gone. Nothing is wrong with the command: another start may do."""

    exit_code = 74  # EX_IOERR of sysexits(3); a Slurm job is requeued, as after any failure but 2
