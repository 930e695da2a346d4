"""The one exception a user is meant to see."""


class UserError(Exception):
    """Bad input (recipe, data, checkpoint, environment), said in one sentence.

    The message names the key or file, the value found, what is allowed and the cure. The command line prints it
    without a traceback and exits with code 2.
    """
