"""The run directory: everything a run leaves behind, written so that a kill at any moment loses at most one step.

Layout::

    config.yaml        resolved recipe, settings and parts
    environment.json   versions, machine, command line
    metrics.jsonl      one flat object a step: step, tokens_generated (cumulative), group/name ...
    evals.jsonl        one object an evaluation: step, tokens_generated, wall_s, accuracy, mean_length, truncated_share
    rollouts/          step-000001.parquet ..., columns in trimtab.run.rollout_table
    ledger.json        every token by what became of it
    summary.json       the run in a few numbers; absent while it goes on
    checkpoints/       left to the trainer
    report.html
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from trimtab.core.errors import ConfigError, DataError, nearest, unknown
from trimtab.core.files import (
    TEMPORARY,
    append_line,
    atomic,
    plain,
    read_json,
    read_lines,
    to_json,
    write_json,
    write_text,
)
from trimtab.core.records import Group
from trimtab.run.environment import environment
from trimtab.run.rollout_table import DICTIONARY, SCHEMA, Decode, PieceTable, rollout_table

CONFIG = "config.yaml"


class RunDir:
    """A run directory. Readers never write, so a report can be made while the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.report = path / "report.html"
        self._rollouts = path / "rollouts"
        self._pieces: tuple[Decode, PieceTable] | None = None

    # ------------------------------------------------------------ making and finding

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any], recipe_name: str) -> Self:
        """A new run directory at ``path``; empty: ``runs/<recipe>-<date>-<time>``, numbered where that is taken.

        Raises ConfigError when ``path`` is a file or a folder with something in it.
        """
        run = cls(_claim(Path(path)) if os.fspath(path) else _claim_new(Path("runs"), recipe_name))
        run.checkpoints.mkdir()
        run._rollouts.mkdir()
        write_json(run.path / "environment.json", environment())
        text = yaml.safe_dump(plain(config, finite=False), sort_keys=False, allow_unicode=True, width=120)
        write_text(run.path / CONFIG, text)
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """The run directory at ``path``. Raises DataError when it is none, naming one that is near."""
        folder = Path(path)
        if not (folder / CONFIG).is_file():
            raise _no_run(folder)
        return cls(folder)

    # ------------------------------------------------------------ writing

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add the metrics of a step; ``record`` holds at least ``step``. On disk when this returns."""
        assert "step" in record, record
        append_line(self.path / "metrics.jsonl", record)

    def append_eval(self, record: Mapping[str, Any]) -> None:
        """Add an evaluation; ``record`` holds at least ``step``. On disk when this returns."""
        assert "step" in record, record
        append_line(self.path / "evals.jsonl", record)

    def write_rollouts(self, step: int, groups: Sequence[Group], decode: Decode) -> None:
        """Write the rollouts of a step, replacing those of an earlier attempt at it.

        ``decode`` (ids to text) is called once for each token id that was not met before.
        """
        if self._pieces is None or self._pieces[0] != decode:
            self._pieces = (decode, PieceTable(decode))
        table = rollout_table(step, groups, self._pieces[1])
        self._rollouts.mkdir(exist_ok=True)
        with atomic(self._rollouts / f"step-{step:06d}.parquet") as file:
            pq.write_table(table, file, compression="zstd", use_dictionary=DICTIONARY)

    def write_ledger(self, ledger: Mapping[str, Any]) -> None:
        """Replace ledger.json."""
        write_text(self.path / "ledger.json", to_json(ledger) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json."""
        write_json(self.path / "summary.json", summary)

    def truncate_after(self, step: int) -> None:
        """Forget everything later than ``step``, before the run is taken up again from there.

        Metric and evaluation lines and rollout files of later steps go, and with them the last evaluation, the summary
        and the report, which speak of a finished run.
        """
        for name in ("metrics.jsonl", "evals.jsonl"):
            records = read_lines(self.path / name)
            kept = [record for record in records if record["step"] <= step and record.get("name") != "after"]
            if (self.path / name).exists():
                write_text(self.path / name, "".join(to_json(record) + "\n" for record in kept))
        for number, file in self._rollout_files().items():
            if number > step:
                file.unlink()
        stale = [self.path / "summary.json", self.report]
        stale += [file for folder in (self.path, self._rollouts) for file in folder.glob(f".*{TEMPORARY}")]
        for file in stale:
            file.unlink(missing_ok=True)

    # ------------------------------------------------------------ reading

    def config(self) -> dict[str, Any]:
        """The resolved configuration; ``trimtab.core.recipe.from_dict`` builds the run from it."""
        path = self.path / CONFIG
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error
        if not isinstance(values, dict):
            raise DataError(f"{path}: {type(values).__name__} in place of a mapping")
        return values

    def environment(self) -> dict[str, Any]:
        """Versions, machine and command line the run started with; empty when that file is gone."""
        return self._object("environment.json")

    def metrics(self) -> list[dict[str, Any]]:
        """One record a step, in the order written."""
        return read_lines(self.path / "metrics.jsonl")

    def evals(self) -> list[dict[str, Any]]:
        """One record an evaluation, in the order written."""
        return read_lines(self.path / "evals.jsonl")

    def ledger(self) -> dict[str, Any]:
        """The ledger as last written; empty before that."""
        return self._object("ledger.json")

    def summary(self) -> dict[str, Any]:
        """The summary; empty while the run goes on."""
        return self._object("summary.json")

    def rollout_steps(self) -> list[int]:
        """Steps whose rollouts were written, ascending."""
        return list(self._rollout_files())

    def rollouts(self, steps: Iterable[int] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Rollouts of ``steps`` (None: all), step by step; only ``columns`` are read (None: all).

        A step without a file adds no rows. Columns that a file lacks are null.
        Raises ConfigError for an unknown column, DataError for a file that is not Parquet.
        """
        for name in columns or ():
            if name not in SCHEMA.names:
                raise unknown("columns", name, SCHEMA.names)
        schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
        files = self._rollout_files()
        wanted = files if steps is None else sorted(set(steps) & set(files))
        return pa.concat_tables([schema.empty_table(), *(_read(files[step], schema) for step in wanted)])

    def _object(self, name: str) -> dict[str, Any]:
        path = self.path / name
        value = read_json(path) if path.exists() else {}
        if not isinstance(value, dict):
            raise DataError(f"{path}: {type(value).__name__} in place of an object")
        return value

    def _rollout_files(self) -> dict[int, Path]:
        found = {int(file.stem[5:]): file for file in self._rollouts.glob("step-*.parquet") if file.stem[5:].isdigit()}
        return dict(sorted(found.items()))


def _read(file: Path, schema: pa.Schema) -> pa.Table:
    try:
        with pq.ParquetFile(file) as parquet:
            table = parquet.read([name for name in schema.names if name in parquet.schema_arrow.names])
        for field in schema:
            if field.name not in table.column_names:
                table = table.append_column(field, pa.nulls(table.num_rows, field.type))
        return table.select(schema.names).cast(schema)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file}: cannot be read as rollouts ({error})") from error


def _claim(path: Path) -> Path:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "holds a run" if (path / CONFIG).exists() else "is not empty" if path.is_dir() else "is a file"
        raise ConfigError(
            f"output.dir: {str(path)!r} {what}, and a new run needs a new or an empty folder. "
            f"Give another one, or continue what is there with resume."
        )
    _make(path)
    return path


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a read-only place, a file on the way
        why = f"output.dir: {str(path)!r} cannot be made ({error.strerror}). Give another folder."
        raise ConfigError(why) from error


def _claim_new(parent: Path, recipe_name: str) -> Path:
    """Making the folder is what claims the name, so two runs started in the same second get two folders."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe_name).strip(".-") or "run"
    name = f"{slug}-{datetime.now():%Y%m%d-%H%M%S}"
    _make(parent)
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def _no_run(folder: Path) -> DataError:
    what = f"no {CONFIG} in it" if folder.is_dir() else "it is a file" if folder.exists() else "it does not exist"
    inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}")) if folder.is_dir() else []
    beside = {path.parent.name: path.parent for path in folder.parent.glob(f"*/{CONFIG}")}
    near = inside[-1] if inside else beside.get(nearest(folder.name, beside) or "")
    hint = f" Did you mean {str(near)!r}?" if near else ""
    return DataError(f"{str(folder)!r} is not a run directory: {what}.{hint}")
