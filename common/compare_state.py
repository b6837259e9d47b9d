"""What a comparison has measured so far, kept in a file after every run, so that an interrupted one can go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.compare_plan import Entry
from common.workloads import Workload


def fingerprint(
    rows: Sequence[Entry], works: Sequence[Workload], rounds: int, together: bool, commit: str | None
) -> dict[str, Any]:
    """All that two parts of one comparison must have in common."""
    return {
        "commit": commit,
        "rounds": rounds,
        "together": together,
        "engines": json.loads(json.dumps({row.name: row.record() for row in rows})),
        "workloads": {w.name: [w.size, w.prompt_tokens, w.output_tokens] for w in works},
    }


@dataclass
class State:
    """Runs by "workload/engine/round", each as RunResult.totals() or what stands for it over HTTP."""

    path: Path
    plan: dict[str, Any]
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    logits: dict[str, dict[str, float]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # not kept: a later try may succeed

    @staticmethod
    def key(workload: str, engine: str, number: int) -> str:
        return f"{workload}/{engine}/{number}"

    @classmethod
    def open(cls, path: Path, plan: dict[str, Any], restart: bool = False) -> State:
        """The state in the file if there is one of the same plan, else an empty one.

        Raises ValueError if the file is of another plan: measurements of two plans are no comparison.
        """
        state = cls(path, plan)
        if restart or not path.is_file():
            return state
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            before = data["plan"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} cannot be read; --restart begins anew") from None
        differs = [key for key in plan if before.get(key) != plan[key]]
        if differs:
            raise ValueError(f"{path} is of a run with another {', '.join(differs)}; --restart begins anew")
        for name in ("runs", "logits", "machine", "versions"):
            setattr(state, name, data[name])
        return state

    def save(self) -> None:
        """The file appears complete or not at all."""
        names = ("plan", "runs", "logits", "machine", "versions")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps({name: getattr(self, name) for name in names}), encoding="utf-8")
        part.replace(self.path)

    def series(self, workload: str, engine: str) -> dict[int, dict[str, Any]]:
        """The runs of one engine on one workload by round."""
        found = {i: self.runs.get(self.key(workload, engine, i)) for i in range(self.plan["rounds"])}
        return {i: run for i, run in found.items() if run is not None}

    def drop(self) -> None:
        """Remove the file: the comparison is complete and has its result elsewhere."""
        self.path.unlink(missing_ok=True)
