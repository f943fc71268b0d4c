"""The story of a run: restore or begin, then step, log, evaluate and save until the end."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist import extras, machine, recipe, stages, workdir
from jaxdist.checkpoint import store as checkpoints
from jaxdist.checkpoint.folder import list_steps, torn_steps
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.config import ConfigError
from jaxdist.data import Dataset, SourceError, Tokenizer, open_dataset
from jaxdist.data.loader import Loader
from jaxdist.decoding import Generate, SamplingConfig, build_generator
from jaxdist.evaluation import evaluate
from jaxdist.mesh import build_mesh
from jaxdist.recipe import RunConfig
from jaxdist.resilience.preemption import StopSignals
from jaxdist.telemetry import html, summary
from jaxdist.telemetry.display import Display
from jaxdist.telemetry.metrics import MetricsWriter, Throughput, Writers
from jaxdist.telemetry.profile import ProfileWindow
from jaxdist.training.state import State
from jaxdist.training.step import Metrics, TrainStep

AHEAD = 3  # steps that may be under way: the device never waits for the host to look at metrics


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what to do."""


class Interrupted(Exception):
    """A signal ended training early; everything is saved."""


@dataclass
class Progress:
    """How far a run has come; saved with every checkpoint."""

    step: int = 0  # updates finished
    tokens_seen: int = 0  # targets with weight > 0
    elapsed_s: float = 0.0  # training time, over all restarts


def run(
    config: RunConfig, folder: Path, *, title: str = "", devices: Sequence[jax.Device] | None = None
) -> State:
    """Trains to the end, from the newest checkpoint if the workdir has one; returns the last state.

    Raises:
      ConfigError: something in the config cannot be, before anything compiles.
      TrainingStopped: losses stayed non-finite.
    """
    devices = jax.devices() if devices is None else devices
    lead = jax.process_index() == 0
    say = print if lead else _silent
    shape, rules, spec = recipe.validate(config, devices)
    with contextlib.ExitStack() as lock:
        checkpoints_folder = folder / workdir.CHECKPOINTS
        with machine.agreed_by_all():
            if lead:
                lock.enter_context(workdir.held(folder))
                has_run = bool(list_steps(checkpoints_folder) or torn_steps(checkpoints_folder))
                workdir.settle_config(folder, config, resuming=has_run)
        store = CheckpointStore(checkpoints_folder, config.checkpoint)
        dataset = open_dataset(
            config.data, sequence_length=config.batch.sequence_length,
            vocab_size=config.vocab_size, seed=config.seed, folder=folder, log=say,
        )  # fmt: skip
        if config.train.eval_every:
            dataset.num_validation_batches(config.batch.global_size)  # refuses if nothing is held out
        if lead:
            about = workdir.describe_run(config, spec, rules, devices, dataset)
            workdir.write_json(folder / workdir.RUN, about | stages.describe(config, spec, rules))
        say(f"mesh: {shape} ({len(devices)} x {devices[0].device_kind}); ", end="")
        say(f"{spec.parameter_count:,} parameters")
        say(recipe.batch_arithmetic(config, shape))
        for line in stages.lines(config, spec, rules):
            say(line)
        mesh = build_mesh(config.mesh, devices)
        built = recipe.build_step(config, spec, mesh, rules)
        generate = None
        if hasattr(config.model_class, "decode"):
            generate = build_generator(spec, mesh, rules, compute=config.precision.compute)
        with store:
            state, progress = _begin(config, built, dataset, store)
            speed = workdir.throughput(config, spec, devices)
            with (
                contextlib.closing(_writers(config, folder, progress, lead)) as writer,
                _display(config, progress, title, lead) as display,
            ):
                session = Session(
                    config, folder, built, dataset, store, writer, display, speed, progress,
                    generate,
                )  # fmt: skip
                return session.train(state)


def _silent(*_: object, **__: object) -> None:
    """Says nothing: processes other than the first."""


def _writers(config: RunConfig, folder: Path, progress: Progress, lead: bool) -> Writers:
    writers: list = [MetricsWriter(folder, enabled=lead)]
    if config.train.tensorboard:
        module = extras.load("jaxdist.telemetry.tensorboard")
        writers.append(module.TensorBoardWriter(folder, enabled=lead, first_step=progress.step))
    return Writers(*writers)


def _display(config: RunConfig, progress: Progress, title: str, lead: bool) -> Display:
    minutes = config.train.max_minutes
    return Display(
        total_steps=config.train.steps, first_step=progress.step, title=title, enabled=lead,
        max_seconds=60 * minutes - progress.elapsed_s if minutes else None,
    )  # fmt: skip


def _begin(
    config: RunConfig, built: TrainStep, dataset: Dataset, store: CheckpointStore
) -> tuple[State, Progress]:
    """Returns the first state and the progress so far; the step is compiled by then.

    The step compiles in one thread and the checkpoint library is imported in another, while the
    state is made or read here: a start takes the longest of the three, not their sum.
    """
    with ThreadPoolExecutor(2) as pool:
        compiled = pool.submit(_compile, config, built, dataset)
        library = pool.submit(checkpoints.preload)
        if not (store.steps() or torn_steps(store.folder)):
            state, progress = built.init(), Progress()
        else:
            library.result()
            restored = store.restore(built.views.abstract)
            workdir.check_data(restored.metadata, dataset)
            state = built.views.staged(restored.state)
            progress = Progress(**restored.metadata["progress"])
        compiled.result()
        return state, progress


def _compile(config: RunConfig, built: TrainStep, dataset: Dataset) -> None:
    """Compiles the train step for the dataset's batches.

    The result stays in jax's cache, where the step's first call finds it. (Calling the compiled
    object itself costs the host a fifth more at every step.)
    """
    built.step.lower(built.abstract_state, abstract_batch(config, built, dataset)).compile()


def abstract_batch(config: RunConfig, built: TrainStep, dataset: Dataset) -> dict[str, Any]:
    """Returns shapes, dtypes and shardings of the global batch."""
    size = config.batch.global_size
    rows = dataset.train_batch(0, size, slice(0, 1))
    whole = {n: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for n, x in rows.items()}
    where = built.batch_shardings(whole)
    return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[n]) for n, x in whole.items()}


@dataclass
class Window:
    """The time since the last row of metrics."""

    began: float  # monotonic seconds
    step: int  # updates finished then
    tokens_seen: int  # by then
    data_wait_s: float  # the loader's counter then
    aside_s: float = 0.0  # spent on evaluation and saving since


class Session:
    """A run under way. Looks at the metrics of a step only when the next ones are on their way."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        built: TrainStep,
        dataset: Dataset,
        store: CheckpointStore,
        writer: Writers,
        display: Display,
        speed: Throughput,
        progress: Progress,
        generate: Generate | None,  # None: the model cannot
    ):
        self.config, self.folder, self.built = config, folder, built
        self.dataset, self.store, self.writer, self.display = dataset, store, writer, display
        self.speed, self.progress, self.generate = speed, progress, generate
        self.waiting: deque[tuple[int, Metrics]] = deque()  # of steps not yet looked at
        self.tokens: list[jax.Array] = []  # weighted targets of the steps since the last row
        self.window = Window(time.monotonic(), progress.step, progress.tokens_seen, 0.0)
        self.evaluated = -1  # the step of the last evaluation

    def train(self, state: State) -> State:
        """Returns the state after the last step, or after the step in which a signal asked to stop.

        Raises:
          TrainingStopped: losses stayed non-finite, the last checkpoint could not be written.
          Interrupted: a signal asked to stop; all is saved.
          SourceError: the data cannot be read.
        """
        if self._is_finished():
            self._say_finished()
            return state
        self._announce()
        try:
            with StopSignals() as stop:
                state = self._steps(state, stop)
        except (SourceError, TrainingStopped) as error:
            reason = "data" if isinstance(error, SourceError) else "nonfinite"
            self.writer.event("stop", self.progress.step, reason=reason, error=str(error))
            raise
        self.store.wait()
        if not self._report_saves():
            self.writer.event("stop", self.progress.step, reason="save_failed")
            raise TrainingStopped("the last checkpoint could not be written; free the disk and run again")
        if stop.asked:
            self.writer.event("preempted", self.progress.step)
            raise Interrupted(f"stopped after step {self.progress.step}, saved; run again to go on")
        self.writer.event("stop", self.progress.step, reason="finished")
        self._keepsakes(state)
        return state

    def _steps(self, state: State, stop: StopSignals) -> State:
        """Returns the state after the steps that are left, or that a signal left."""
        first, last = self.progress.step + 1, self.config.train.steps
        profile, loader = self._profile(), self._loader()
        with contextlib.closing(profile), loader:
            self.window.began = time.monotonic()
            for number in range(first, last + 1):
                state, metrics = self.built.step(state, next(loader))
                self.waiting.append((number, metrics))
                if len(self.waiting) > AHEAD:
                    self._look(loader)
                profile.step(number, metrics)
                if self._is_due(number):
                    self._settle(loader)
                    self._pause(state, number, ended=number == last)
                if stop.asked or self._time_is_up(number):
                    break
                state = self._hurried(state, number)
            self._settle(loader)
            self._pause(state, self.progress.step, ended=True)
        return state

    def _announce(self) -> None:
        step = self.progress.step
        self.writer.event("start", step, devices=jax.device_count(), processes=jax.process_count())
        for bad, reason in self.store.bad_steps.items():
            self.writer.event("bad_checkpoint", bad, reason=reason)
            self.display.note(f"checkpoint {bad} cannot be used: {reason}")
        if step:
            self.writer.event("restore", step)
            self.display.note(f"resumed after step {step}")

    def _say_finished(self) -> None:
        self.display.note(
            f"{self.folder} is finished at step {self.progress.step}. To go on, raise train.steps where the "
            f"schedule allows it; to start anew, give another --workdir."
        )

    def _is_finished(self) -> bool:
        """Returns whether the restored run had come to its end, by steps or by time."""
        train, progress = self.config.train, self.progress
        over = 0 < 60 * train.max_minutes <= progress.elapsed_s
        return progress.step >= train.steps or over

    def _profile(self) -> ProfileWindow:
        wanted = self.config.profile
        lead = jax.process_index() == 0
        return ProfileWindow(self.folder, wanted.start_step, wanted.num_steps, enabled=lead)

    def _loader(self, split: str = "train", start: int | None = None) -> Loader:
        shardings = abstract_batch(self.config, self.built, self.dataset)
        return Loader(
            self.dataset,
            global_size=self.config.batch.global_size,
            shardings={name: x.sharding for name, x in shardings.items()},
            start=self.progress.step if start is None else start,
            prefetch=self.config.data.prefetch,
            split=split,
        )

    # --- looking at metrics -----------------------------------------------------------------------

    def _settle(self, loader: Loader) -> None:
        """Looks at all steps that were not looked at yet."""
        while self.waiting:
            self._look(loader)

    def _look(self, loader: Loader) -> None:
        """Waits for the oldest step under way and books it."""
        number, metrics = self.waiting.popleft()
        skipped = int(metrics["skipped"])  # waits until the step is done
        self.progress.step = number
        self.tokens.append(metrics["tokens"])
        self.display.step(number)
        if skipped:
            self._nonfinite(number, skipped)
        every = self.config.train.log_every
        if number == 1 or number % every == 0 or number == self.config.train.steps:
            self._row(number, metrics, loader)

    def _row(self, number: int, metrics: Metrics, loader: Loader) -> None:
        now, window = time.monotonic(), self.window
        seconds = now - window.began - window.aside_s
        self._count_tokens()
        seen, steps = self.progress.tokens_seen, number - window.step
        values = {name: x.item() for name, x in jax.device_get(metrics).items()}
        del values["tokens"], values["skipped"]
        row = values | {"tokens_seen": seen}
        row |= self.speed.fields(seconds=seconds, steps=steps, tokens=seen - window.tokens_seen)
        row["data_wait_s"] = (loader.data_wait_s - window.data_wait_s) / steps
        self.progress.elapsed_s += seconds
        self.window = Window(now, number, seen, loader.data_wait_s)
        self.writer.write(number, row)
        self.display.row(number, row)
        self._report_saves()

    def _count_tokens(self) -> None:
        """Adds the tokens of the steps looked at to the run's."""
        self.progress.tokens_seen += sum(int(count) for count in jax.device_get(self.tokens))
        self.tokens.clear()

    def _nonfinite(self, number: int, skipped: int) -> None:
        self.writer.event("nonfinite", number, skipped_in_a_row=skipped)
        self.display.note(f"step {number}: loss or gradients are not finite; update left out")
        limit = self.config.optimizer.nonfinite_limit
        if skipped > limit:
            raise TrainingStopped(
                f"{skipped} steps in a row with non-finite loss or gradients "
                f"(optimizer.nonfinite_limit={limit}); lower optimizer.learning_rate, "
                f"or look at the data from step {number - skipped + 1} on"
            )

    # --- evaluating and saving --------------------------------------------------------------------

    def _is_due(self, number: int) -> bool:
        every = self.config.train.eval_every
        return (every > 0 and number % every == 0) or self.store.should_save(number, time.monotonic())

    def _pause(self, state: State, number: int, *, ended: bool) -> None:
        """Evaluates and saves what is due after a step; the time does not count as training."""
        began, elapsed_s, every = time.monotonic(), self._elapsed_s(), self.config.train.eval_every
        if every and (ended or number % every == 0) and self.evaluated != number:
            self._evaluate(state, number)
        if self.store.should_save(number, time.monotonic(), last=ended):
            self._count_tokens()
            progress = asdict(self.progress) | {"elapsed_s": elapsed_s}
            fingerprints = {"config": recipe.run_fingerprint(self.config), "data": self.dataset.fingerprint}
            metadata = {"progress": progress, "fingerprints": fingerprints}
            self.store.save(number, self.built.views.flat(state), metadata)
        self._report_saves()
        self.window.aside_s += time.monotonic() - began

    def _evaluate(self, state: State, number: int) -> None:
        self.display.status("evaluating")
        with self._loader("validation", 0) as batches:
            found = evaluate(self.built.evaluate, state, batches)
        self.evaluated = number
        row = {"eval_loss": found.loss, "eval_tokens": found.tokens}
        self.writer.write(number, row)
        self.writer.event("evaluate", number, **row)
        self.display.evaluation(number, row)

    def _report_saves(self) -> bool:
        """Writes what became of saves; returns whether the last of them, if any, is good."""
        good = True
        for saved in self.store.poll():
            self.writer.event(
                "save", saved.step, ok=saved.ok, error=saved.error and str(saved.error),
                seconds=saved.seconds, bytes=saved.bytes,
            )  # fmt: skip
            if not saved.ok:
                self.display.note(f"checkpoint {saved.step} failed, training goes on: {saved.error}")
            good = saved.ok
        return good

    def _keepsakes(self, state: State) -> None:
        """Writes a sample of what the model says now, and the report."""
        train, tokenizer = self.config.train, self.dataset.tokenizer
        text = ""
        if train.sample_tokens and tokenizer is not None and self.generate is not None:
            text = self._sample(self.built.views.flat(state), tokenizer)
        if jax.process_index() == 0:
            if text:
                workdir.write_text(self.folder / workdir.SAMPLE, text)
            page = html.render([summary.read_run(self.folder)])
            workdir.write_text(self.folder / workdir.REPORT, page)
            self.display.note(f"report: {self.folder / workdir.REPORT}")

    def _sample(self, state: State, tokenizer: Tokenizer) -> str:
        train = self.config.train
        self.display.status("sampling")
        weights = state.trainable if state.ema is None else state.ema
        assert self.generate is not None
        try:
            (found,) = self.generate(
                weights, state.model_state, [tokenizer.encode(train.sample_prompt)],
                max_tokens=train.sample_tokens, sampling=SamplingConfig(temperature=0.8),
                seed=self.config.seed,
            )  # fmt: skip
        except ConfigError as error:  # the run is done and saved: no sample is no failure
            self.display.note(f"no sample: {error}")
            return ""
        text = train.sample_prompt + tokenizer.decode(found.tokens)
        self.display.note(f"sample:\n{text}")
        return text

    # --- ending by the clock ----------------------------------------------------------------------

    def _elapsed_s(self) -> float:
        window = self.window
        return self.progress.elapsed_s + time.monotonic() - window.began - window.aside_s

    def _time_is_up(self, number: int) -> bool:
        """Returns whether the run's time or its schedule has ended; all processes agree."""
        minutes = self.config.train.max_minutes
        if not minutes or number % self.config.train.log_every:
            return False
        return machine.agreed(self._elapsed_s() >= 60 * minutes)

    def _hurried(self, state: State, number: int) -> State:
        """Returns the state with its schedule's pace set so that it ends with the time."""
        train = self.config.train
        if not train.max_minutes or number % train.log_every or number < 2 * train.log_every:
            return state
        clock, pace = (float(x) for x in (state.opt_state.clock, state.opt_state.pace))
        per_step = self._elapsed_s() / number
        steps_left = max((60 * train.max_minutes - self._elapsed_s()) / per_step, 1.0)
        wanted = machine.agreed(max((train.steps - clock) / steps_left, 1.0))
        if wanted == pace:
            return state
        new = jax.device_put(np.float32(wanted), state.opt_state.pace.sharding)
        return state._replace(opt_state=state.opt_state._replace(pace=new))
