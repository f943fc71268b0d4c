"""Seeds faults into the package, and records which test catches each one.

    python benchmarks/house_faults.py list
    python benchmarks/house_faults.py check [--tree TREE]
    python benchmarks/house_faults.py run [--tree TREE] [--record FILE] [NAME ...]
    python benchmarks/house_faults.py sound [--tree TREE] [NAME ...]

A fault replaces a snippet of a function by another one. The function is found by its
name, in any file, and the snippet by its syntax: moved or reformatted code needs no
change here. Rewritten code does: `check` names the faults whose snippet no longer
exists, in seconds. `run` seeds the faults one by one and takes about 20 minutes for
all. `sound` runs the tests of the list without any fault.
"""

import argparse
import ast
import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "house" / "faults.json"
LIMIT_S = 200.0  # for the tests of one fault; a run without end counts as caught
SOUND_LIMIT_S = 3600.0  # for all tests together, without a fault
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "*.egg-info")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A change of one function that tests must catch."""

    name: str
    room: str  # what it is about: checkpoint, trainer, step, ...
    function: str  # "function", "Class.method", "outer.inner", or an assigned "NAME"
    old: str  # an expression, or one or more statements, of that function
    new: str  # what stands there instead
    tests: tuple[str, ...]  # "folder/test_file.py::test_name", or a file
    module: str = ""  # stem of the file, where the function's name is not unique


class Place(NamedTuple):
    """Where a fault goes: a range of bytes of a file."""

    file: Path
    start: int
    end: int
    column: int  # of the first byte in its line
    is_expression: bool


class Retarget(Exception):
    """A fault or one of its tests is not where the list says; the message tells why."""


# --- finding and changing syntax ------------------------------------------------------


def statements(source: str) -> list[ast.stmt]:
    """Parses a snippet."""
    return ast.parse(source).body


def is_expression(source: str) -> bool:
    """Tells whether a snippet is a single expression."""
    body = statements(source)
    return len(body) == 1 and isinstance(body[0], ast.Expr)


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields (qualified name, node) of functions, classes and assigned names."""
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{node.name}."
            yield inner[:-1], node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield f"{prefix}{target.id}", node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield f"{prefix}{node.target.id}", node
        yield from definitions(node, inner)


def bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yields every list of statements below a node."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                yield body


def expressions(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields all expressions below a node but those in f-strings.

    Before Python 3.12 their places in the source are not told.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.expr):
            yield node
        yield from expressions(node)


def matches(tree: ast.AST, fault: Fault) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yields the (first, last) node of each occurrence of the old snippet."""
    snippet = statements(fault.old)
    if is_expression(fault.old) and is_expression(fault.new):
        wanted = ast.unparse(snippet[0].value)
        for node in expressions(tree):
            if ast.unparse(node) == wanted:
                yield node, node
        return
    wanted = [ast.unparse(node) for node in snippet]
    count = len(wanted)
    for body in bodies(tree):
        texts = [ast.unparse(node) for node in body]
        for start in range(len(body) - count + 1):
            if texts[start : start + count] == wanted:
                yield body[start], body[start + count - 1]


def place_of(file: Path, source: bytes, first: ast.AST, last: ast.AST) -> Place:
    """Finds the bytes between the begin of one node and the end of another."""
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    start = begins[first.lineno - 1] + first.col_offset
    end = begins[last.end_lineno - 1] + last.end_col_offset
    return Place(file, start, end, first.col_offset, isinstance(first, ast.expr))


class Package:
    """The package of a tree, parsed once."""

    def __init__(self, tree: Path):
        """Reads all its modules.

        Args:
          tree: the root of a checkout.
        """
        self.sources = {}
        self.known: list[tuple[str, Path, ast.AST]] = []
        for file in sorted((tree / "jaxdist").rglob("*.py")):
            self.sources[file] = file.read_bytes()
            for name, node in definitions(ast.parse(self.sources[file])):
                self.known.append((name, file, node))

    def places(self, name: str, fault: Fault) -> tuple[int, set[Place]]:
        """Finds the functions of a name: their number, and the snippets in them."""
        count = 0
        found = set()
        for known, file, node in self.known:
            if known != name and not known.endswith(f".{name}"):
                continue
            count += 1
            for first, last in matches(node, fault):
                found.add(place_of(file, self.sources[file], first, last))
        return count, found

    def locate(self, fault: Fault) -> Place:
        """Finds where a fault goes.

        Raises:
          Retarget: its snippet is not there, or there more than once.
        """
        count, found = self.places(fault.function, fault)
        if not found:  # a method may have moved to another class
            last = fault.function.rpartition(".")[2]
            others, found = self.places(last, fault)
            count = count or others
        if len(found) > 1 and fault.module:
            found = {place for place in found if place.file.stem == fault.module}
        if not count:
            raise Retarget(f"there is no {fault.function}")
        if not found:
            raise Retarget(f"{fault.function} has no such snippet")
        if len(found) > 1:
            files = sorted({place.file.name for place in found})
            raise Retarget(f"{len(found)} such snippets, in {', '.join(files)}")
        return found.pop()

    def changed(self, place: Place, fault: Fault) -> bytes:
        """Makes the file's source with the fault in it."""
        lines = fault.new.strip("\n").splitlines()
        text = ("\n" + " " * place.column).join(lines)
        if place.is_expression:
            text = f"({fault.new})"
        source = self.sources[place.file]
        result = source[: place.start] + text.encode() + source[place.end :]
        if ast.dump(ast.parse(result)) == ast.dump(ast.parse(source)):
            raise Retarget("the fault changes nothing")
        return result


def resolved(tree: Path, test: str) -> str:
    """Finds a test by its name, also in another file than the list has it.

    Raises:
      Retarget: there is no such test, or there are several.
    """
    path, _, name = test.partition("::")
    file = tree / "tests" / path
    pattern = re.compile(rf"^def {re.escape(name.partition('[')[0])}\(", re.MULTILINE)
    if file.is_file() and (not name or pattern.search(file.read_text())):
        return f"tests/{test}"
    candidates = sorted((tree / "tests").rglob("test_*.py"))
    if name:
        found = [each for each in candidates if pattern.search(each.read_text())]
    else:
        found = [each for each in candidates if each.name == file.name]
    if len(found) != 1:
        raise Retarget(f"{len(found)} tests are called {test}")
    moved = found[0].relative_to(tree)
    return f"{moved}::{name}" if name else str(moved)


# --- running tests --------------------------------------------------------------------


class Outcome(NamedTuple):
    """What became of a fault."""

    status: str  # caught, not caught, not found, broken (no test could run)
    by: str  # the test that failed first
    why: str
    seconds: float


def run_tests(scratch: Path, tests: Sequence[str], limit_s: float) -> Outcome:
    """Runs tests in a copy of the tree, up to the first that fails."""
    options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(scratch)}
    environment.setdefault("COLUMNS", "300")  # a summary of one line a test
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return Outcome("caught", "(no end)", f"after {limit_s:.0f} s", limit_s)
    seconds = round(time.monotonic() - began, 1)
    if done.returncode == 0:
        return Outcome("not caught", "", "", seconds)
    line = re.search(r"^(?:FAILED|ERROR) (\S+::.*)$", done.stdout, re.MULTILINE)
    if line:
        test, _, why = line[1].partition(" - ")
        why = why.replace(str(scratch), "TREE").replace(sys.executable, "(python)")
        why = re.sub(r"/tmp/[^\s']*", "(path)", why)
        return Outcome("caught", test.removeprefix("tests/"), why[:200], seconds)
    if done.returncode < 0:
        return Outcome("caught", "(crash)", f"signal {-done.returncode}", seconds)
    last = (done.stdout + done.stderr).strip().splitlines()[-12:]
    return Outcome("broken", "", "\n".join(last), seconds)


def copied(tree: Path, folder: Path) -> Path:
    """Copies a tree to seed faults in; git and what runs leave behind stay."""
    scratch = folder / "tree"
    shutil.copytree(tree, scratch, ignore=NOT_COPIED, symlinks=True)
    return scratch


def seeded(fault: Fault, package: Package, scratch: Path) -> Outcome:
    """Seeds a fault into the scratch copy, runs its tests, and takes it out again."""
    try:
        place = package.locate(fault)
        changed = package.changed(place, fault)
        tests = [resolved(scratch, test) for test in fault.tests]
    except Retarget as reason:
        return Outcome("not found", "", str(reason), 0.0)
    before = place.file.read_bytes()
    place.file.write_bytes(changed)
    try:
        return run_tests(scratch, tests, LIMIT_S)
    finally:
        place.file.write_bytes(before)


# --- the record -----------------------------------------------------------------------


def git(tree: Path, *arguments: str) -> str:
    """Returns what git prints; "" where there is no repository."""
    command = ["git", "-C", str(tree), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip()


def described(tree: Path) -> dict[str, str]:
    """Names the code that faults were seeded into."""
    return {
        "commit": git(tree, "rev-parse", "HEAD"),
        "package": git(tree, "rev-parse", "HEAD:jaxdist"),
        "changed": git(tree, "status", "--porcelain", "jaxdist"),
        "python": platform.python_version(),
        "jax": version("jax"),
    }


def write_record(
    file: Path, tree: Path, outcomes: dict[str, Outcome], faults: Sequence[Fault]
) -> None:
    """Writes the outcomes; those of other faults stay as they are in the file."""
    known = {}
    if file.is_file():
        known = {row["name"]: row for row in json.loads(file.read_text())["faults"]}
    for fault in faults:
        if fault.name in outcomes:
            row = {"name": fault.name, "room": fault.room, "function": fault.function}
            known[fault.name] = row | outcomes[fault.name]._asdict()
    rows = [known[fault.name] for fault in faults if fault.name in known]
    caught = sum(row["status"] == "caught" for row in rows)
    document = {
        "tree": described(tree),
        "caught": caught,
        "of": len(faults),
        "faults": rows,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")


# --- commands -------------------------------------------------------------------------


def chosen(names: Sequence[str]) -> list[Fault]:
    """Returns the faults of these names, or of a room; without names all."""
    known = {fault.name for fault in FAULTS} | {fault.room for fault in FAULTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no fault or room is called {', '.join(unknown)}")
    if not names:
        return list(FAULTS)
    return [fault for fault in FAULTS if fault.name in names or fault.room in names]


def show_list() -> int:
    """Prints all faults."""
    for fault in FAULTS:
        print(f"{fault.room:<12} {fault.name:<32} {fault.function}")
    print(f"{len(FAULTS)} faults")
    return 0


def check(tree: Path, faults: Sequence[Fault]) -> int:
    """Prints what is not found any more; returns 1 if there is any."""
    package = Package(tree)
    lost = 0
    for fault in faults:
        try:
            package.changed(package.locate(fault), fault)
            for test in fault.tests:
                resolved(tree, test)
        except Retarget as reason:
            lost += 1
            print(f"{fault.name}: {reason}")
    print(f"{len(faults) - lost} of {len(faults)} faults and their tests are found")
    return 1 if lost else 0


def run(tree: Path, faults: Sequence[Fault], record: Path | None) -> int:
    """Seeds the faults one by one; returns 1 if one of them is not caught."""
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="house-faults-") as folder:
        scratch = copied(tree, Path(folder))
        package = Package(scratch)
        for fault in faults:
            outcome = seeded(fault, package, scratch)
            outcomes[fault.name] = outcome
            text = f"{outcome.by} {outcome.why}".strip()
            print(f"{fault.name}: {outcome.status} ({outcome.seconds} s) {text}")
            sys.stdout.flush()
            if record:
                write_record(record, tree, outcomes, FAULTS)
    caught = sum(outcome.status == "caught" for outcome in outcomes.values())
    print(f"{caught} of {len(faults)} faults are caught")
    return 0 if caught == len(faults) else 1


def sound(tree: Path, faults: Sequence[Fault]) -> int:
    """Runs the tests of the faults without any fault; returns 1 if one fails."""
    with tempfile.TemporaryDirectory(prefix="house-faults-") as folder:
        scratch = copied(tree, Path(folder))
        named = {resolved(scratch, test) for fault in faults for test in fault.tests}
        outcome = run_tests(scratch, sorted(named), SOUND_LIMIT_S)
    if outcome.status == "not caught":
        print(f"{len(named)} tests pass without a fault ({outcome.seconds} s)")
        return 0
    print(f"without a fault: {outcome.by} {outcome.why}")
    return 1


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("list", "check", "run", "sound"))
    parser.add_argument("names", nargs="*", help="faults or rooms; default: all")
    parser.add_argument("--tree", type=Path, default=ROOT, help="root of a checkout")
    parser.add_argument("--record", type=Path, help="JSON file to update")
    flags = parser.parse_intermixed_args()
    faults = chosen(flags.names)
    tree = flags.tree.resolve()
    if flags.command == "list":
        return show_list()
    if flags.command == "check":
        return check(tree, faults)
    if flags.command == "sound":
        return sound(tree, faults)
    return run(tree, faults, flags.record)


# --- the faults -----------------------------------------------------------------------

FAULTS = (
    # Checkpoints, storage and what a resumed run begins with.
    Fault(
        name="file_digests_not_compared",
        room="checkpoint",
        function="check",
        module="integrity",
        old="hashed[name] != manifest.files[name]",
        new="False",
        tests=(
            "checkpoint/test_manifest.py::test_one_flipped_bit_in_any_file_is_seen",
        ),
    ),
    Fault(
        name="seal_not_compared",
        room="checkpoint",
        function="parse_manifest",
        old="text != _text(manifest)",
        new="False",
        tests=("checkpoint/test_manifest.py::test_every_byte_of_a_manifest_matters",),
    ),
    Fault(
        name="fingerprints_not_compared",
        room="checkpoint",
        function="_check_arrays",
        old="sums[name] != manifest.fingerprints.get(name)",
        new="False",
        tests=(
            "checkpoint/test_manifest.py::"
            "test_a_state_that_is_not_the_saved_one_is_seen_even_if_the_files_are_sound",
        ),
    ),
    Fault(
        name="steps_of_another_run_accepted",
        room="checkpoint",
        function="check",
        module="integrity",
        old="run is not None and manifest.run != run",
        new="False",
        tests=("checkpoint/test_manifest.py::test_a_step_of_another_run_is_foreign",),
    ),
    Fault(
        name="step_counts_without_manifest",
        room="checkpoint",
        function="_is_sealed",
        old="has_items and (path / MANIFEST).is_file()",
        new="has_items",
        tests=(
            "checkpoint/test_manifest.py::test_a_save_that_dies_before_its_seal_never_counts",
        ),
    ),
    Fault(
        name="sealed_before_the_writes_end",
        room="checkpoint",
        function="CheckpointManager._seal",
        old="self._backend.finish()",
        new="None",
        tests=(
            "checkpoint/test_manager.py::test_a_step_is_sealed_after_its_last_write",
        ),
    ),
    Fault(
        name="commit_barrier_dropped",
        room="checkpoint",
        function="FailableBarrier.wait",
        old='self._wait_for(f"{prefix}/{other}", deadline)',
        new="None",
        tests=(
            "distributed/test_coordination.py::"
            "test_who_waits_at_a_barrier_hears_why_another_failed",
        ),
    ),
    Fault(
        name="file_not_synced",
        room="storage",
        function="write_bytes",
        old="os.fsync(file.fileno())",
        new="None",
        tests=(
            "storage/test_storage.py::test_a_durable_file_is_on_the_disk_before_it_has_its_name",
        ),
    ),
    Fault(
        name="folder_not_synced",
        room="storage",
        function="write_bytes",
        old="os.fsync(folder)",
        new="None",
        tests=(
            "storage/test_storage.py::test_a_durable_file_is_on_the_disk_before_it_has_its_name",
        ),
    ),
    Fault(
        name="half_a_file_takes_the_place",
        room="storage",
        function="replacing",
        old="""
try:
    yield partial
    os.replace(partial, target)
finally:
    _remove(partial)
""",
        new="""
try:
    yield partial
finally:
    os.replace(partial, target)
""",
        tests=("storage/test_storage.py::test_a_failed_write_leaves_what_was_there",),
    ),
    Fault(
        name="lock_is_shared",
        room="storage",
        function="_take",
        old="fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        new="fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        tests=(
            "storage/test_storage.py::test_a_lock_names_its_holder_and_is_free_after_it",
        ),
    ),
    Fault(
        name="oldest_steps_kept",
        room="checkpoint",
        function="expired",
        old="past[-(keep_last - 1) :]",
        new="past[: keep_last - 1]",
        tests=("checkpoint/test_manager.py::test_which_steps_expire",),
    ),
    Fault(
        name="best_step_expires",
        room="checkpoint",
        function="expired",
        old="[step for step in best if step in steps][-1:]",
        new="[]",
        tests=("library/test_fitted.py::test_the_best_checkpoint_is_kept_and_read",),
    ),
    Fault(
        name="milestone_expires",
        room="checkpoint",
        function="CheckpointManager._tidy",
        old="saved not in self.milestones",
        new="True",
        tests=("checkpoint/test_manager.py::test_a_milestone_is_due_and_kept",),
    ),
    Fault(
        name="quarantine_replaces_what_it_has",
        room="checkpoint",
        function="quarantine",
        old="target.exists()",
        new="False",
        tests=("checkpoint/test_manifest.py::test_quarantine_keeps_what_it_has",),
    ),
    Fault(
        name="manifest_not_durable",
        room="checkpoint",
        function="seal",
        old="atomic.write_text(path / MANIFEST, _text(manifest), durable=True)",
        new="atomic.write_text(path / MANIFEST, _text(manifest))",
        tests=(
            "checkpoint/test_manifest.py::test_a_seal_is_on_the_disk_before_the_step_counts",
        ),
    ),
    Fault(
        name="saves_after_the_folder_is_taken",
        room="checkpoint",
        function="CheckpointManager._make_room",
        old="not self._is_ours()",
        new="False",
        tests=("checkpoint/test_owner.py::test_a_run_that_loses_its_folder_ends",),
    ),
    Fault(
        name="keep_every_ignored",
        room="checkpoint",
        function="expired",
        old="not (keep_every and step % keep_every == 0)",
        new="True",
        tests=("checkpoint/test_manager.py::test_keep_last_and_keep_every_together",),
    ),
    Fault(
        name="another_model_takes_an_older_step",
        room="checkpoint",
        function="CheckpointManager.restore",
        old="raise",
        new="continue",
        tests=(
            "checkpoint/test_manager.py::"
            "test_another_model_is_refused_and_not_replaced_by_an_older_step",
        ),
    ),
    Fault(
        name="deletion_without_a_mark",
        room="checkpoint",
        function="remove_step",
        old="mark_unfinished(folder, step)",
        new="None",
        tests=("checkpoint/test_manifest.py::test_a_deletion_that_dies_is_finished",),
    ),
    Fault(
        name="reader_moves_damaged_steps",
        room="checkpoint",
        function="CheckpointManager._quarantine_damaged",
        old='self.mode == "write" and jax.process_index() == 0',
        new="jax.process_index() == 0",
        tests=(
            "checkpoint/test_manifest.py::test_a_reader_leaves_damaged_steps_where_they_are",
        ),
    ),
    Fault(
        name="step_saved_twice",
        room="checkpoint",
        function="CheckpointManager.decide_save",
        old="due and step != self._last_begun",
        new="due",
        tests=(
            "checkpoint/test_manager.py::test_saves_are_due_by_steps_time_and_at_the_end",
        ),
    ),
    Fault(
        name="fetched_step_not_checked",
        room="checkpoint",
        function="Copies._download",
        old="integrity.check(target.parent, step)",
        new="None",
        tests=(
            "operations/test_copies.py::"
            "test_damage_in_the_store_is_seen_and_the_older_step_fetched",
        ),
    ),
    Fault(
        name="skipped_batches_not_saved",
        room="resume",
        function="checkpoint_metadata",
        old="run.dataset.windows",
        new="[]",
        tests=(
            "trainer/test_health.py::"
            "test_a_run_that_dies_and_begins_again_goes_the_same_way",
        ),
    ),
    Fault(
        name="schedule_not_saved",
        room="resume",
        function="checkpoint_metadata",
        old="run_metadata.SCHEDULE",
        new='"left out"',
        tests=(
            "trainer/test_extension.py::test_wsd_goes_back_to_where_its_decay_began",
        ),
    ),
    Fault(
        name="resume_repeats_a_batch",
        room="resume",
        function="Trainer._train_until_fault",
        old=(
            "batching.train_loader(self.run.composition, self.shardings, self.dataset, "
            "done)"
        ),
        new=(
            "batching.train_loader(self.run.composition, self.shardings, self.dataset, "
            "max(done - 1, 0))"
        ),
        tests=("library/test_fit.py::test_stop_and_go_on_from_every_form_of_data",),
    ),
    Fault(
        name="fingerprint_leaves_out_the_optimizer",
        room="resume",
        function="run_fingerprint",
        old="keys_that_may_change(config)",
        new='[path for path in values if path.startswith("optimizer.")]',
        tests=(
            "trainer/test_run_config.py::test_the_fingerprint_sees_what_changes_losses",
        ),
    ),
    Fault(
        name="changed_config_accepted",
        room="resume",
        function="check_stored_config",
        old="raise ConfigError(faults)",
        new="pass",
        tests=(
            "commands/test_train.py::test_a_changed_config_is_refused_with_its_differences",
        ),
    ),
    Fault(
        name="changed_data_accepted",
        room="resume",
        function="check_data",
        old="known != dataset.fingerprint",
        new="False",
        tests=("trainer/test_trainer.py::test_changed_data_is_refused_on_resume",),
    ),
    Fault(
        name="progress_lost_on_resume",
        room="resume",
        function="_restore",
        module="start",
        old="progress = progress_of(restored.metadata)",
        new="progress = Progress(step=progress_of(restored.metadata).step)",
        tests=(
            "trainer/test_hooks.py::test_a_resumed_run_counts_tokens_and_time_from_where_it_was",
        ),
    ),
    # The loop of a run, and what watches it.
    Fault(
        name="stop_signal_unheard",
        room="trainer",
        function="StopSignals.finish_step",
        old="self._steps >= self._stop_at",
        new="False",
        tests=(
            "trainer/test_processes.py::test_a_users_own_handler_is_called_and_put_back",
        ),
    ),
    Fault(
        name="each_process_stops_at_its_own_step",
        room="trainer",
        function="StopSignals._agree",
        old="max(answers.values()) + 1",
        new="self._steps + 1",
        tests=(
            "trainer/test_processes.py::test_processes_stop_at_the_same_step_whatever_their_pace",
        ),
    ),
    Fault(
        name="no_evaluation_at_the_end",
        room="trainer",
        function="Hook.on_step",
        old="at_end or view.step % self.steps == 0",
        new="view.step % self.steps == 0",
        tests=(
            "trainer/test_hooks.py::test_every_calls_at_its_steps_and_at_the_end_once",
        ),
    ),
    Fault(
        name="best_checkpoint_not_kept",
        room="trainer",
        function="KeepBest.on_evaluate",
        old="self._run.store.best.append(view.step)",
        new="None",
        tests=("library/test_fitted.py::test_the_best_checkpoint_is_kept_and_read",),
    ),
    Fault(
        name="patience_of_one_more",
        room="trainer",
        function="BestRule.exhausted",
        old='best["since"] < self.patience',
        new='best["since"] <= self.patience',
        tests=("library/test_fitted.py::test_a_run_that_gets_no_better_stops",),
    ),
    Fault(
        name="hooks_charged_to_steps",
        room="trainer",
        function="StepLog.paused",
        old="self._window.paused_s += seconds",
        new="pass",
        tests=("trainer/test_hooks.py::test_the_time_of_hooks_is_not_training_time",),
    ),
    Fault(
        name="max_minutes_ignored",
        room="trainer",
        function="TimeLimit.reason",
        old="left_s is None or left_s > 0",
        new="True",
        tests=(
            "library/test_fitted.py::test_a_hook_or_the_clock_that_ends_a_run_is_named",
        ),
    ),
    Fault(
        name="max_minutes_forgets_restarts",
        room="trainer",
        function="TimeLimit.resume",
        old="self.earlier_s = earlier_s",
        new="pass",
        tests=(
            "trainer/test_hooks.py::test_the_time_limit_counts_all_since_the_data_is_open_over_resumes",
        ),
    ),
    Fault(
        name="rollback_keeps_progress",
        room="trainer",
        function="Trainer._roll_back",
        old="self.progress.go_to(run_metadata.progress_of(metadata))",
        new="self.progress.step = run_metadata.progress_of(metadata).step",
        tests=(
            "trainer/test_health.py::test_a_rollback_takes_back_the_targets_that_were_counted",
        ),
    ),
    Fault(
        name="rollback_leaves_out_a_batch_less",
        room="trainer",
        function="SkippingDataset.without",
        old="self.position(last_step - 1) + 1",
        new="self.position(last_step - 1)",
        tests=(
            "trainer/test_health.py::test_a_rollback_leaves_out_the_window_and_goes_on",
        ),
    ),
    Fault(
        name="nonfinite_steps_not_counted",
        room="step",
        function="UpdateRule._apply",
        old="state.opt_state.skipped + 1",
        new="state.opt_state.skipped",
        tests=(
            "step/test_train_step.py::"
            "test_a_step_with_nonfinite_gradients_changes_nothing_but_counts",
        ),
    ),
    Fault(
        name="nonfinite_moments_kept",
        room="step",
        function="UpdateRule._update_whole",
        old="where_finite(good, moments, state.opt_state.optimizer)",
        new="moments",
        tests=(
            "step/test_train_step.py::"
            "test_a_step_with_nonfinite_gradients_changes_nothing_but_counts",
        ),
    ),
    Fault(
        name="watchdog_limit_of_zero_is_now",
        room="watchdog",
        function="Watchdog.at",
        old="limit_s or math.inf",
        new="limit_s",
        tests=("operations/test_watchdog.py::test_a_limit_of_zero_is_none",),
    ),
    Fault(
        name="watchdog_does_not_learn_slow_steps",
        room="watchdog",
        function="Watchdog._limit_s",
        old="max(limit, config.slow_steps * median)",
        new="limit",
        tests=(
            "operations/test_watchdog.py::test_limits_go_by_phase_and_grow_with_slow_steps",
        ),
    ),
    Fault(
        name="hang_ends_with_another_code",
        room="watchdog",
        function="_exit_pipe.leave",
        old="os._exit(EXIT_HANG)",
        new="os._exit(1)",
        tests=(
            "operations/test_watchdog.py::test_a_hang_ends_with_76_and_is_described",
        ),
    ),
    Fault(
        name="devices_found_before_the_watch",
        room="watchdog",
        function="main",
        module="train",
        old="folder = cli.workdir_of(flags)",
        new="""
folder = cli.workdir_of(flags)
jax.local_device_count()
""",
        tests=(
            "operations/test_watchdog.py::test_the_watch_begins_before_devices_are_found",
        ),
    ),
    Fault(
        name="lost_steps_counted_twice",
        room="ledger",
        function="account",
        old="buckets[STEP] -= lost",
        new="pass",
        tests=("operations/test_ledger.py::test_the_line_says_where_the_time_went",),
    ),
    Fault(
        name="down_after_the_end",
        room="ledger",
        function="_gap_s",
        old="life.done",
        new="False",
        tests=(
            "operations/test_ledger.py::test_the_time_after_a_finished_life_is_no_part_of_the_run",
        ),
    ),
    Fault(
        name="rolled_back_steps_not_lost",
        room="ledger",
        function="Ledger.enter",
        old="life.undone += max(0, life.step - max(done, life.first))",
        new="pass",
        tests=("operations/test_ledger.py::test_a_rollback_behind_a_lifes_first_step",),
    ),
    # One step, and how it is laid out.
    Fault(
        name="count_of_the_last_part_alone",
        room="step",
        function="_sum_accumulation_steps.add",
        old="return (gradients, jax.tree.map(jnp.add, loss, more)), None",
        new="""
total = jax.tree.map(jnp.add, loss, more)
return (gradients, total._replace(count=more.count)), None
""",
        tests=("step/test_train_step.py::test_meshes_and_parts_change_nothing",),
    ),
    Fault(
        name="aux_not_divided",
        room="step",
        function="UpdateRule._apply",
        old='{f"aux/{name}": value / count for name, value in loss.aux.items()}',
        new='{f"aux/{name}": value for name, value in loss.aux.items()}',
        tests=("step/test_train_step.py::test_terms_beside_the_loss_have_its_divisor",),
    ),
    Fault(
        name="gradients_summed_twice",
        room="step",
        function="_summed.total",
        old="execution.sum_over(sent, axes)",
        new="execution.sum_over(execution.sum_over(sent, axes), axes)",
        tests=("step/test_reduction.py::test_accumulation_sums_over_data_once_a_step",),
    ),
    Fault(
        name="tables_cross_in_half_precision",
        room="step",
        function="sent_dtype",
        old='"vocab" not in names and not is_vector(names, dims)',
        new="True",
        tests=(
            "step/test_reduction.py::test_kernels_alone_cross_in_the_dtype_of_reduce",
        ),
    ),
    Fault(
        name="clip_by_the_sum",
        room="step",
        function="UpdateRule._apply",
        old="norm = norm_of_sum / count",
        new="norm = norm_of_sum",
        tests=(
            "step/test_train_step.py::test_the_reference_drops_clips_and_has_unequal_parts",
        ),
    ),
    Fault(
        name="average_decays_the_other_way",
        room="step",
        function="UpdateRule._update_whole",
        old="e + (1 - decay) * (p - e)",
        new="e + decay * (p - e)",
        tests=(
            "step/test_train_step.py::"
            "test_the_moving_average_follows_the_parameters_and_is_evaluated",
        ),
    ),
    Fault(
        name="average_not_evaluated",
        room="step",
        function="State.model_arrays",
        old="self.ema is None",
        new="True",
        tests=(
            "step/test_train_step.py::"
            "test_the_moving_average_follows_the_parameters_and_is_evaluated",
        ),
    ),
    Fault(
        name="keys_do_not_follow_the_step",
        room="step",
        function="build_step_with_gradients.inspect",
        old="jax.random.fold_in(key_of(config.seed, STEPS), state.step)",
        new="key_of(config.seed, STEPS)",
        tests=("step/test_train_step.py::test_what_is_dropped_follows_the_step",),
    ),
    Fault(
        name="samples_change_parts",
        room="step",
        function="split",
        module="batch_parts",
        old="return jnp.moveaxis(rows, 1, 0)",
        new="return jnp.moveaxis(rows, 1, 0)[:: 1 if x.ndim == 2 else -1]",
        tests=("step/test_train_step.py::test_meshes_and_parts_change_nothing",),
    ),
    Fault(
        name="dropout_without_the_sample",
        room="models",
        function="dropout",
        old="jax.random.fold_in(key, sample)",
        new="key",
        tests=(
            "models/test_transformer.py::test_dropout_keeps_the_mean_and_follows_the_sample_not_the_place",
        ),
    ),
    Fault(
        name="moments_not_sharded_at_zero_1",
        room="parallel",
        function="Rules.state",
        old="self.zero >= 1",
        new="self.zero >= 2",
        tests=("parallel/test_sharding.py::test_zero_says_what_fsdp_shards",),
    ),
    Fault(
        name="experts_shared_out_over_their_own_axis",
        room="parallel",
        function="Rules.shard_axes",
        old='("fsdp",) if "experts" in names else self.shards',
        new="self.shards",
        tests=(
            "models/test_experts_model.py::test_nothing_but_vectors_is_held_twice_over_fsdp_and_expert",
        ),
    ),
    Fault(
        name="residual_not_split_by_tensor",
        room="parallel",
        function="Rules.activation",
        old='(*SEQUENCE_AXES, "tensor")',
        new="SEQUENCE_AXES",
        tests=(
            "parallel/test_sharding.py::"
            "test_activations_follow_their_names_and_leave_out_what_does_not_divide",
        ),
    ),
    Fault(
        name="optimizer_state_without_its_factored_dim",
        room="parallel",
        function="state_specs.spec_of",
        old="PartitionSpec(*entries[:missing], *entries[missing + 1 :])",
        new="PartitionSpec(*entries[: len(leaf.shape)])",
        tests=(
            "optim/test_optimizers.py::test_factored_moments_keep_the_axes_of_the_dims_they_keep",
        ),
    ),
    # Data.
    Fault(
        name="order_without_the_seed",
        room="data",
        function="Dataset.__init__",
        old="order_key(seed, str(number))",
        new="order_key(0, str(number))",
        tests=(
            "data/test_dataset.py::test_batches_do_not_depend_on_processes_or_on_where_one_starts",
        ),
    ),
    Fault(
        name="every_epoch_in_one_order",
        room="data",
        function="permute",
        old=(
            "_mix(epoch.astype(np.uint64) * np.uint64(_GOLDEN) "
            "+ np.asarray(key, np.uint64))"
        ),
        new="_mix(0 * epoch.astype(np.uint64) + np.asarray(key, np.uint64))",
        tests=("data/test_dataset.py::test_every_epoch_is_a_permutation_of_its_own",),
    ),
    Fault(
        name="positions_do_not_begin_again",
        room="data",
        function="PackedDocuments.read",
        old="positions = count_up(length) * used",
        new="positions = np.arange(len(segments)) % self._length_S * used",
        tests=(
            "data/test_dataset.py::"
            "test_packing_numbers_documents_of_a_row_and_their_positions",
        ),
    ),
    Fault(
        name="one_segment_a_row",
        room="data",
        function="PackedDocuments.read",
        old="np.where(owner < 0, 0, rank + 1)",
        new="np.where(owner < 0, 0, 1)",
        tests=(
            "data/test_dataset.py::"
            "test_packing_numbers_documents_of_a_row_and_their_positions",
        ),
    ),
    Fault(
        name="each_process_begins_at_its_own_sample",
        room="data",
        function="Dataset.train_batch",
        old="self._locate_batch(step, global_size)",
        new="self._locate(step * len(chosen) + np.arange(global_size))",
        tests=(
            "data/test_dataset.py::test_batches_do_not_depend_on_processes_or_on_where_one_starts",
        ),
    ),
    Fault(
        name="held_out_documents_are_trained_on",
        room="data",
        function="split_all",
        old="store.take(~held)",
        new="store.take(held | ~held)",
        tests=("data/test_dataset.py::test_train_and_validation_share_no_document",),
    ),
    # Products, attention, experts, the loss.
    Fault(
        name="tokens_do_not_see_themselves",
        room="ops",
        function="_logits",
        module="attention_reference",
        old="row >= column",
        new="row > column",
        tests=("ops/test_attention.py::test_reference_equals_definition",),
    ),
    Fault(
        name="window_of_one_more",
        room="ops",
        function="_logits",
        module="attention_reference",
        old="row - column < options.window",
        new="row - column <= options.window",
        tests=("ops/test_attention.py::test_reference_equals_definition",),
    ),
    Fault(
        name="softcap_without_its_slope",
        room="ops",
        function="_gradients",
        module="attention_reference",
        old="options.softcap is not None",
        new="False",
        tests=("ops/test_attention.py::test_reference_equals_definition",),
    ),
    Fault(
        name="decoded_tokens_one_place_off",
        room="models",
        function="Transformer.decode",
        old="cache.length[:, None] + steps[None, :]",
        new="cache.length[:, None] + steps[None, :] + 1",
        tests=(
            "inference/test_decoding.py::test_cached_logits_equal_the_whole_forward_pass",
        ),
    ),
    Fault(
        name="rotation_backwards",
        room="models",
        function="rotate",
        module="layers",
        old="second * cos + first * sin",
        new="second * cos - first * sin",
        tests=(
            "models/test_transformer.py::"
            "test_rotation_turns_halves_of_the_first_dims_by_position_times_frequency",
        ),
    ),
    Fault(
        name="router_weights_not_normalised",
        room="ops",
        function="route",
        old="""
if normalise:
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
""",
        new="pass",
        tests=("ops/test_experts_routing.py::test_softmax_as_mixtral_qwen_and_olmoe",),
    ),
    Fault(
        name="router_bias_in_the_weights",
        room="ops",
        function="route",
        old="jnp.where(chosen, all_scores[..., None, :], 0)",
        new="jnp.where(chosen, choice[..., None, :], 0)",
        tests=(
            "ops/test_experts_routing.py::test_sigmoid_with_bias_and_groups_as_deepseek_v3",
        ),
    ),
    Fault(
        name="half_of_the_z_gradient",
        room="ops",
        function="_score",
        module="cross_entropy",
        old="1 + 2 * options.z_loss * log_z",
        new="1 + options.z_loss * log_z",
        tests=("ops/test_ops.py::test_cross_entropy_equals_autodiff_of_the_formula",),
    ),
    # Optimizers and schedules.
    Fault(
        name="first_update_lost",
        room="optim",
        function="build_schedule.schedule",
        old="(done + 1) / warmup",
        new="done / warmup",
        tests=("optim/test_optimizers.py::test_schedule_has_its_closed_form",),
    ),
    Fault(
        name="norms_decay",
        room="optim",
        function="decay_mask",
        old="role.kind in kinds",
        new="True",
        tests=("optim/test_optimizers.py::test_weight_decay_touches_what_it_should",),
    ),
    Fault(
        name="extension_rewrites_the_past",
        room="optim",
        function="_shape.shape",
        old="jnp.where(done < part.start, before(done), after)",
        new="after",
        tests=(
            "optim/test_optimizers.py::test_a_decay_is_extended_from_the_rate_it_has",
        ),
    ),
    # Planning, FLOPs and figures.
    Fault(
        name="ring_sends_all_of_its_chunks",
        room="planner",
        function="wire_bytes",
        old='(2 if kind == "all-reduce" else 1) * payload * (members - 1) / members',
        new='(2 if kind == "all-reduce" else 1) * payload',
        tests=(
            "planner/test_formulas.py::test_a_ring_is_bound_by_bandwidth_whatever_its_size",
        ),
    ),
    Fault(
        name="memory_without_moments",
        room="planner",
        function="held_state",
        old="_leaf_bytes(rules, jax.tree.leaves(moments), places)",
        new="[n // 2 for n in _leaf_bytes(rules, jax.tree.leaves(moments), places)]",
        tests=("planner/test_memory.py::test_the_state_is_that_of_the_built_step",),
    ),
    Fault(
        name="batch_held_whole_by_all",
        room="planner",
        function="held_state",
        old="_whole_bytes(batch_shapes(run)) // rules.shape.batch_shards",
        new="_whole_bytes(batch_shapes(run))",
        tests=(
            "planner/test_memory.py::test_a_device_holds_its_own_rows_of_the_batch",
        ),
    ),
    Fault(
        name="flops_conventions_swapped",
        room="ops",
        function="AttentionCost.fused_flops",
        old='convention == "causal"',
        new='convention == "full"',
        tests=("trainer/test_model_flops.py::test_the_config_s_hook_is_the_formula",),
    ),
    Fault(
        name="mfu_is_the_full_one",
        room="telemetry",
        function="Throughput.fields",
        old="rate * self.causal_flops_per_token / self.peak_flops_per_s",
        new="rate * self.full_flops_per_token / self.peak_flops_per_s",
        tests=("telemetry/test_metrics.py::test_throughput_fields",),
    ),
    Fault(
        name="tokens_without_weight_counted",
        room="telemetry",
        function="_count_tokens",
        old='jnp.sum((batch["weights"] > 0) & ~(norm < -1))',
        new='jnp.int32(batch["weights"].size)',
        tests=(
            "step/test_train_step.py::test_the_reference_drops_clips_and_has_unequal_parts",
        ),
    ),
    Fault(
        name="first_row_of_a_step_wins",
        room="telemetry",
        function="_LastRows.add",
        old="rows_by_step.pop(step, None)\nrows_by_step[step] = row",
        new="rows_by_step.setdefault(step, row)",
        tests=("telemetry/test_metrics.py::test_rows_of_undone_steps_do_not_count",),
    ),
    # Models of others.
    Fault(
        name="import_without_a_transpose",
        room="interop",
        function="_ATTENTION",
        old='"attention/out HND -> D HN"',
        new='"attention/out HND -> HN D"',
        tests=("interop/test_interop.py::test_logits_are_those_of_transformers",),
    ),
    Fault(
        name="import_reshapes_where_it_should_turn",
        room="interop",
        function="HuggingFaceReader._read_shard",
        old="merged.reshape(shard_sizes).transpose(order)",
        new="merged.reshape(block[position].shape)",
        tests=("interop/test_interop.py::test_logits_are_those_of_transformers",),
    ),
    # What is refused.
    Fault(
        name="uneven_batch_accepted",
        room="validation",
        function="_batch_faults",
        old="batch.global_size % unit == 0",
        new="True",
        tests=(
            "trainer/test_run_config.py::"
            "test_the_batch_divides_by_accumulation_and_shards",
        ),
    ),
    Fault(
        name="loss_that_is_no_sum_is_summed_once",
        room="validation",
        function="obstacle",
        module="reduction",
        old="not spec.sums_over_samples",
        new="False",
        tests=(
            "step/test_reduction.py::test_once_is_refused_for_a_model_that_it_would_change",
        ),
    ),
    Fault(
        name="sequence_beyond_the_model_accepted",
        room="validation",
        function="component_faults",
        old="longest and longest < length",
        new="False",
        tests=(
            "trainer/test_run_config.py::test_a_sequence_is_no_longer_than_the_learned_positions",
        ),
    ),
    # Several processes.
    Fault(
        name="processes_that_differ_go_on",
        room="distributed",
        function="agree",
        module="consistency",
        old="raise ConfigError(faults)",
        new="pass",
        tests=(
            "operations/test_watchdog.py::test_a_peer_that_differs_is_named_by_all_without_a_collective",
        ),
    ),
    Fault(
        name="error_of_another_process_unheard",
        room="distributed",
        function="raise_on_all",
        old="raise _peer_error(first, errors[first])",
        new="pass",
        tests=(
            "distributed/test_coordination.py::"
            "test_a_config_error_of_one_process_is_raised_on_all",
        ),
    ),
    Fault(
        name="broadcast_keeps_its_own",
        room="distributed",
        function="broadcast",
        module="coordination",
        old="return json.loads(client.blocking_key_value_get(key, 1000 * FOREVER_S))",
        new="return value",
        tests=(
            "distributed/test_coordination.py::"
            "test_a_broadcast_gives_all_the_value_of_the_first",
        ),
    ),
    # Operations.
    Fault(
        name="restarts_after_a_config_error",
        room="operations",
        function="_FINAL",
        old="{EXIT_NO_CHECKPOINT, EXIT_CONFIG}",
        new="{EXIT_NO_CHECKPOINT}",
        tests=(
            "operations/test_supervisor.py::"
            "test_these_exit_codes_pass_through_without_a_restart",
        ),
    ),
    Fault(
        name="progress_does_not_refill_the_budget",
        room="operations",
        function="Supervisor._after_loss",
        old="[cause] if progressed else [*self._failures, cause]",
        new="[*self._failures, cause]",
        tests=("operations/test_supervisor.py::test_progress_refills_the_budget",),
    ),
    Fault(
        name="grows_at_the_first_look",
        room="operations",
        function="GrowthTimer.due",
        old="now - self._room_since >= min(self._steady_s, STEADY_S)",
        new="True",
        tests=(
            "operations/test_supervisor.py::"
            "test_growth_is_due_once_capacity_has_lasted",
        ),
    ),
    Fault(
        name="slow_device_not_said",
        room="operations",
        function="device_lines",
        old="rate < OF_DEVICES * median or (is_below and not most_are_slow)",
        new="False",
        tests=(
            "operations/test_preflight.py::test_a_slow_device_is_named_beside_the_others_and_the_table",
        ),
    ),
    Fault(
        name="events_counted_once",
        room="operations",
        function="RunMetrics.event",
        old="self._events[name] += 1",
        new="self._events[name] = 1",
        tests=("operations/test_prometheus.py::test_a_scrape_finds_the_run_as_it_is",),
    ),
    Fault(
        name="copy_of_the_best_step_deleted",
        room="operations",
        function="Copier._expire",
        old=(
            "folders.expired(candidates, newest=local[-1], "
            "keep_last=self._manager.config.keep_last, "
            "keep_every=self._manager.config.keep_every, best=self._manager.best)"
        ),
        new=(
            "folders.expired(candidates, newest=local[-1], "
            "keep_last=self._manager.config.keep_last, "
            "keep_every=self._manager.config.keep_every)"
        ),
        tests=(
            "operations/test_copies.py::test_the_copy_of_the_best_step_stays_where_the_step_itself_is_gone",
        ),
    ),
    Fault(
        name="died_said_to_run",
        room="operations",
        function="RunFiles.outcome",
        old='return "died", "its process ended without a word"',
        new='return "running", None',
        tests=("operations/page/test_status.py::test_what_became_of_a_run",),
    ),
    Fault(
        name="preempted_life_counts_as_done",
        room="operations",
        function="Ledger.on_end",
        old="self.end_with(EXIT_PREEMPTED)",
        new="None",
        tests=(
            "checkpoint/test_interval.py::test_each_end_of_a_run_counts_as_what_it_is",
        ),
    ),
)


if __name__ == "__main__":
    sys.exit(main())
