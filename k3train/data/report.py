"""What was wrong with the rows of a corpus: counted, and named by file and row."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

# Enough to find a pattern; the counts go on beyond it.
NAMED_PER_KIND = 1000


class Problem(StrEnum):
    """Why a row was dropped or changed."""

    EMPTY = "empty"
    OVERSIZED = "oversized"
    NON_UTF8 = "non_utf8"
    MISSING_FIELD = "missing_field"
    NOT_A_STRING = "not_a_string"
    MALFORMED = "malformed"


@dataclass
class Report:
    """Counts of rows and problems, with the first `NAMED_PER_KIND` rows of each kind by name."""

    rows: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    named: dict[str, list[dict]] = field(default_factory=dict)

    def add(self, problem: Problem, file: str, row: int, detail: str = "") -> None:
        """Note `problem` in `row` (from 1) of `file`."""
        self.counts[problem] = self.counts.get(problem, 0) + 1
        entries = self.named.setdefault(problem, [])
        if len(entries) < NAMED_PER_KIND:
            entries.append({"file": file, "row": row, "detail": detail})

    def as_dict(self) -> dict:
        """Plain types, for JSON."""
        return {"rows": self.rows, "counts": dict(self.counts), "named": dict(self.named)}

    def lines(self) -> list[str]:
        """The report in words, one line per kind with the first rows that had it."""
        if not self.counts:
            return [f"{self.rows} rows read, none with a problem."]
        lines = [f"{self.rows} rows read, {sum(self.counts.values())} with a problem:"]
        for problem in Problem:
            if problem in self.counts:
                first = self.named[problem][:3]
                where = ", ".join(f"{entry['file']} row {entry['row']}" for entry in first)
                more = ", ..." if self.counts[problem] > len(first) else ""
                detail = f" ({first[0]['detail']})" if first[0]["detail"] else ""
                lines.append(f"  {problem}: {self.counts[problem]}{detail}: {where}{more}")
        return lines


def merge_reports(parts: Iterable[dict]) -> Report:
    """One report of the dictionaries of many, in their order."""
    total = Report()
    for part in parts:
        total.rows += part["rows"]
        for problem, count in part["counts"].items():
            total.counts[problem] = total.counts.get(problem, 0) + count
            entries = total.named.setdefault(problem, [])
            entries.extend(part["named"][problem][: NAMED_PER_KIND - len(entries)])
    return total
