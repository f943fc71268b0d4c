"""The story of a run: restore or begin, then step, log, evaluate and save until the end."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from jaxdist import config as configs
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import extras
from jaxdist.data import SourceError, open_dataset
from jaxdist.data.loader import Loader
from jaxdist.distributed import consistency, coordination, straggler
from jaxdist.inference.decoding import Generate, build_generator
from jaxdist.parallel.mesh import build_mesh
from jaxdist.resilience import elastic, preemption
from jaxdist.resilience.health import Diverged, Monitor, SkippingDataset
from jaxdist.resilience.preemption import Interrupted, Preempted, StopSignals
from jaxdist.resilience.watchdog import Watchdog
from jaxdist.step.evaluation import evaluate
from jaxdist.step.state import Metrics, State
from jaxdist.step.train_step import TrainStep
from jaxdist.telemetry.display import Display, print_safe
from jaxdist.telemetry.metrics import MetricsWriter, Throughput, Writers
from jaxdist.telemetry.profile import ProfileWindow
from jaxdist.trainer import build as run_build
from jaxdist.trainer import final_outputs, pipeline_report, restore, run_config, validation, workdir
from jaxdist.trainer.restore import Progress, TrainResult, UserInputs
from jaxdist.trainer.run_config import RunConfig

AHEAD = 3  # steps that may be under way: the device never waits for the host to look at metrics


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what to do."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason  # in the event `stop`


def run(config: RunConfig, folder: Path, **options: Any) -> State:
    """Returns the last state of `train`.

    Raises:
      Interrupted: a signal ended it early; Preempted if not by a Ctrl-C to a process alone.
    """
    outcome = train(config, folder, **options)
    if outcome.stopped:
        raise (Preempted if preemption.must_leave() else Interrupted)(outcome.stopped)
    return outcome.state


def train(
    config: RunConfig,
    folder: Path,
    *,
    title: str = "",
    devices: Sequence[jax.Device] | None = None,
    full_devices: int | None = None,
    given: UserInputs | None = None,
    watch: Watchdog | None = None,
) -> TrainResult:
    """Trains to the end, from the newest checkpoint if the workdir has one; returns how it ended.

    On other devices than the `full_devices` of an elastic run's config, its layout is refitted.

    Raises:
      ConfigError: something in the config cannot be, before anything compiles.
      TrainingStopped: losses stayed non-finite.
    """
    preemption.refuse_unjoined()
    devices = jax.devices() if devices is None else devices
    lead = jax.process_index() == 0
    say = print_safe if lead else lambda _: None
    asked, config = config, elastic.refit(config, devices=len(devices), full_devices=full_devices)
    build = given and given.build
    shape, rules, spec = validation.validate(config, devices, with_data=given is None, build=build)
    with contextlib.ExitStack() as lock:
        watch = watch or lock.enter_context(Watchdog(config.watchdog, folder))  # a command's is on already
        watch.at("start")
        flat = configs.flatten(configs.to_config_dict(config))
        consistency.agree(lambda: flat | consistency.code(spec.model_class))
        with coordination.raise_on_all():
            if lead:
                lock.enter_context(workdir.workdir_lock(folder))
                workdir.check_resume_config(folder, asked)
            store = workdir.open_checkpoints(folder, config)
        consistency.agree(lambda: {"the checkpoint folder's owner (all need the same folder)": store.owner()})
        dataset = (
            given.dataset
            if given
            else open_dataset(
                config.data,
                sequence_length=config.batch.sequence_length,
                vocab_size=config.vocab_size,
                seed=config.seed,
                folder=folder,
                log=watch.lively(say),
            )
        )
        consistency.agree(lambda: {"data": dataset.fingerprint})
        if config.train.eval_every:
            dataset.num_validation_batches(config.batch.global_size)  # refuses if nothing is held out
        if lead:
            about = workdir.describe_run(config, spec, rules, devices, dataset)
            workdir.write_json(folder / workdir.RUN, about | pipeline_report.describe(config, spec, rules))
        say(f"mesh: {shape} ({len(devices)} x {devices[0].device_kind}); {run_build.counts(config, spec)}")
        say(run_build.batch_arithmetic(config, shape))
        for line in pipeline_report.lines(config, spec, rules):
            say(line)
        mesh = build_mesh(config.mesh, devices)
        built = run_build.build_step(config, spec, mesh, rules, optimizer=given and given.optimizer)
        decodes, compute = hasattr(spec.model_class, "decode"), config.precision.compute
        generate = build_generator(spec, mesh, rules, compute=compute) if decodes else None
        with store:
            with workdir.logs_bad_checkpoints(folder, enabled=lead):
                state, progress, data = restore.init_or_restore(
                    config, built, dataset, store, folder, watch, given
                )
            speed = workdir.throughput(config, spec, devices)
            with (
                contextlib.closing(_writers(config, folder, progress, lead)) as writer,
                _display(config, progress, title, lead) as display,
            ):
                session = Session(
                    config, folder, built, data, store, writer, display, speed, progress, generate, watch
                )
                state, stopped = session.train(state), session.stopped
        return TrainResult(config, spec, mesh, rules, built, state, stopped)


def _writers(config: RunConfig, folder: Path, progress: Progress, lead: bool) -> Writers:
    writers: list = [MetricsWriter(folder, enabled=lead)]
    if config.train.tensorboard:
        module = extras.load("jaxdist.telemetry.tensorboard")
        writers.append(module.TensorBoardWriter(folder, enabled=lead, first_step=progress.step))
    return Writers(*writers)


def _display(config: RunConfig, progress: Progress, title: str, lead: bool) -> Display:
    minutes = config.train.max_minutes
    return Display(
        total_steps=config.train.steps,
        first_step=progress.step,
        title=title,
        enabled=lead,
        max_seconds=60 * minutes - progress.elapsed_s if minutes else None,
    )


@dataclass
class MetricsWindow:
    """The time since the last row of metrics."""

    began: float  # monotonic seconds
    step: int  # updates finished then
    tokens_seen: int  # by then
    data_wait_s: float = 0.0  # the loader's counter then
    device_wait_s: float = 0.0  # the monitor's
    aside_s: float = 0.0  # spent on evaluation and saving since


class Session:
    """A run under way. Looks at the metrics of a step only when the next ones are on their way."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        built: TrainStep,
        dataset: SkippingDataset,
        store: CheckpointManager,
        writer: Writers,
        display: Display,
        speed: Throughput,
        progress: Progress,
        generate: Generate | None,  # None: the model cannot
        watch: Watchdog,
    ):
        self.config, self.folder, self.built = config, folder, built
        self.dataset, self.store, self.writer, self.display = dataset, store, writer, display
        self.speed, self.progress, self.generate, self.watch = speed, progress, generate, watch
        self.pace = straggler.Pace(writer.event)
        self.monitor = Monitor(
            config.health,
            nonfinite_limit=config.optimizer.nonfinite_limit,
            samples=self._samples,
            event=writer.event,
            note=display.note,
        )
        self.waiting: deque[tuple[int, Metrics]] = deque()  # of steps not yet looked at
        self.tokens: list[jax.Array] = []  # weighted targets of the steps since the last row
        self.window = MetricsWindow(time.monotonic(), progress.step, progress.tokens_seen)
        self.evaluated = -1  # the step of the last evaluation
        self.last_save_good = True
        self.stopped = ""  # why the run ended early

    def train(self, state: State) -> State:
        """Returns the state after the last step, or after the step in which a signal asked to stop.

        Raises:
          TrainingStopped: losses stayed non-finite, the last checkpoint could not be written.
          SourceError: the data cannot be read.
        """
        if self._is_finished():
            self._say_finished()
            return state
        self._announce()
        try:
            with StopSignals() as stop:
                state = self._steps(state, stop)
        except (SourceError, TrainingStopped, jax.errors.JaxRuntimeError) as error:
            reason = "data" if isinstance(error, SourceError) else getattr(error, "reason", "runtime")
            self.writer.event("stop", self.progress.step, reason=reason, error=str(error))
            raise
        if not all((self.store.wait(), self._report_saves())):
            self.writer.event("stop", self.progress.step, reason="save_failed")
            raise TrainingStopped(
                "the last checkpoint could not be written; free the disk and run again", "save_failed"
            )
        if stop.asked and self.progress.step < self.config.train.steps:
            self.writer.event("preempted", self.progress.step)
            self.stopped = f"stopped after step {self.progress.step}, saved; run again to go on"
            return state
        self.writer.event("stop", self.progress.step, reason="finished")
        self._at("end", self.progress.step)
        final_outputs.write_final_outputs(
            self.config,
            self.folder,
            self.built.views.flat(state),
            tokenizer=self.dataset.tokenizer,
            generate=self.generate,
            display=self.display,
        )
        return state

    def _steps(self, state: State, stop: StopSignals) -> State:
        """Returns the state after the steps that are left, or that a signal left."""
        with contextlib.closing(self._profile()) as profile:
            while True:
                try:
                    return self._stretch(state, stop, profile)
                except Diverged as error:
                    fault = error.with_traceback(None)  # whose frames hold a state
                state = self._recovered(fault)

    def _stretch(self, state: State, stop: StopSignals, profile: ProfileWindow) -> State:
        """Returns the state after steps in a row, to the end unless the run diverges."""
        first, last = self.progress.step + 1, self.config.train.steps
        with self._loader() as loader:
            self.window.began = time.monotonic()
            for number in range(first, last + 1):
                self._at("data", number)
                batch = next(loader)
                self._at("step", number)
                state, metrics = self.built.step(state, batch)
                self.monitor.compare(number, state)
                self.waiting.append((number, metrics))
                if len(self.waiting) > AHEAD:
                    self._look(loader)
                profile.step(number, metrics)
                if self._is_due(number):
                    self._settle(loader)
                    self._pause(state, number, ended=number == last)
                if stop.reached() or self._time_is_up(number):
                    break
            self._settle(loader)
            self._pause(state, self.progress.step, ended=True, stopped=stop.asked)
        return state

    def _recovered(self, fault: Diverged) -> State:
        """Returns the state of the last good checkpoint, to go on from without the data since.

        Raises:
          TrainingStopped: by the policy, or because there is none.
        """
        self._at("restore", fault.first)
        elapsed_s, allowed, found = self._elapsed_s(), self.config.health.max_rollbacks, None
        if fault.policy == "rollback" and len(self.dataset.windows) < allowed:
            abstract = self.built.views.abstract
            found = restore.roll_back(self.store, self.folder, abstract, self.dataset, fault)
        self._report_saves()
        if found is None:
            cure = f"lower optimizer.learning_rate, or look at the data from step {fault.first} on"
            if fault.kind == "drift":
                cure = "replace the device, then run again"
            raise TrainingStopped(f"{fault}; {cure}", fault.kind)
        (state, metadata), self.dataset = found
        self.progress = Progress(**metadata["progress"] | {"elapsed_s": elapsed_s})
        step = self.progress.step
        self.waiting.clear()
        self.tokens.clear()
        self.window = MetricsWindow(time.monotonic(), step, self.progress.tokens_seen)
        self.window.device_wait_s = self.monitor.waited_s
        self.monitor.rewound(step)
        self.pace = straggler.Pace(self.writer.event)
        left_out = self.dataset.windows[-1]
        self.writer.event("restore", step, diverged_at=fault.last, reason=str(fault), left_out=left_out)
        self.display.note(f"{fault}: back to step {step}, batches {left_out} are left out")
        return self.built.views.staged(state)

    def _samples(self, number: int) -> tuple[int, int]:
        """Returns the first and the last global sample index that a step takes."""
        size = self.config.batch.global_size
        first = self.dataset.position(number - 1) * size
        return first, first + size - 1

    def _at(self, phase: str, number: int) -> None:
        """Tells the watchdog what begins."""
        self.watch.at(phase, number, done=self.progress.step, sample=self._samples(max(number, 1))[0])

    def _announce(self) -> None:
        step = self.progress.step
        if resized := elastic.resized(self.folder, self.config, jax.device_count()):
            self.writer.event("resize", step, **resized)
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
        shardings = restore.abstract_batch(self.config, self.built, self.dataset)
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
        self.monitor.look(number, metrics)  # waits until the step is done
        self.progress.step = number
        self.tokens.append(metrics["tokens"])
        self.display.step(number)
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
        waited_s = self.monitor.waited_s
        row |= self.pace.row(number, steps=steps, seconds=seconds, waited_s=waited_s - window.device_wait_s)
        self.progress.elapsed_s += seconds
        self.window = MetricsWindow(now, number, seen, loader.data_wait_s, waited_s)
        self.writer.write(number, row)
        self.display.row(number, row)
        self._report_saves()

    def _count_tokens(self) -> None:
        """Adds the tokens of the steps looked at to the run's."""
        self.progress.tokens_seen += sum(int(count) for count in jax.device_get(self.tokens))
        self.tokens.clear()

    # --- evaluating and saving --------------------------------------------------------------------

    def _is_due(self, number: int) -> bool:
        every = self.config.train.eval_every
        return (every > 0 and number % every == 0) or self.store.should_save(number, time.monotonic())

    def _pause(self, state: State, number: int, *, ended: bool, stopped: bool = False) -> None:
        """Evaluates and saves what is due, if `stopped` in any case; the time is not training's."""
        began, elapsed_s, every = time.monotonic(), self._elapsed_s(), self.config.train.eval_every
        if every and not stopped and (ended or number % every == 0) and self.evaluated != number:
            self._evaluate(state, number)
        self._at("save", number)
        if self.store.should_save(number, time.monotonic(), last=ended, stopped=stopped):
            self._count_tokens()
            progress = asdict(self.progress) | {"elapsed_s": elapsed_s}
            fingerprints = {
                "config": run_config.run_fingerprint(self.config),
                "data": self.dataset.fingerprint,
            }
            metadata = {
                "progress": progress,
                "fingerprints": fingerprints,
                restore.SKIPPED: self.dataset.windows,
            }
            self.store.save(number, self.built.views.flat(state), metadata, wait=ended)
        self._report_saves()
        self.window.aside_s += time.monotonic() - began

    def _evaluate(self, state: State, number: int) -> None:
        self.display.status("evaluating")
        with self._loader("validation", 0) as batches:
            watched = self.watch.over(batches, "evaluate", number, self.progress.step)
            found = evaluate(self.built.evaluate, state, watched)
        self.evaluated = number
        row = {"eval_loss": found.loss, "eval_tokens": found.tokens}
        self.writer.write(number, row)
        self.writer.event("evaluate", number, **row)
        self.display.evaluation(number, row)

    def _report_saves(self) -> bool:
        """Writes what became of saves; returns whether the last of them, if any, is good."""
        for saved in self.store.poll():
            self.writer.event(
                "save",
                saved.step,
                ok=saved.ok,
                error=saved.error and str(saved.error),
                seconds=saved.seconds,
                bytes=saved.bytes,
            )
            if not saved.ok:
                self.display.note(f"checkpoint {saved.step} failed, training goes on: {saved.error}")
            self.last_save_good = saved.ok
        return self.last_save_good

    # --- ending by the clock ----------------------------------------------------------------------

    def _elapsed_s(self) -> float:
        window = self.window
        return self.progress.elapsed_s + time.monotonic() - window.began - window.aside_s

    def _time_is_up(self, number: int) -> bool:
        """Returns whether the run's time is over; all processes agree."""
        minutes = self.config.train.max_minutes
        if not minutes or number % self.config.train.log_every:
            return False
        return coordination.broadcast(self._elapsed_s() >= 60 * minutes)
