"""A trained run as a model of lm_eval (extra `eval`), on any mesh.

Load this module with `extras.load`. It translates lm_eval's requests into calls of
`TrainedRun`.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from jaxdist.config import ConfigError, suggest
from jaxdist.evaluation.held_out_set import check_range
from jaxdist.evaluation.trained_run import TextScore, TrainedRun, Watch
from jaxdist.inference.decoding import SamplingConfig

# tasks that need no network; a task's data files are next to it
SHIPPED = Path(__file__).parent / "tasks"
_LENGTH_OPTIONS = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)
_DEFAULT_LENGTH = 256  # new tokens if a task sets none of these


class RunModel(LM):  # type: ignore[misc] # lm_eval has no types
    """A trained run behind the interface of lm_eval's models.

    All processes of a group make the same calls.

    Args:
      run: the loaded run.
      longest: longest text in tokens; None: the model's.
      stride: tokens by which windows over whole texts move; None: lm_eval's windows.
      watch: called with every batch that is scored.
    """

    def __init__(
        self,
        run: TrainedRun,
        *,
        longest: int | None = None,
        stride: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__()
        self._run = run
        self._longest = longest
        self._stride = stride
        self._watch = watch

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Scores each continuation after its context.

        Returns:
          For each request the log-probability in nats, and whether greedy decoding
          gives the continuation.
        """
        pairs = [request.args for request in requests]
        return [(score.log_probability, score.greedy) for score in self._scores(pairs)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Scores each whole text, in nats.

        Without a stride, texts are cut into lm_eval's own windows.
        """
        pairs = [("", *request.args) for request in requests]
        return [
            score.log_probability for score in self._scores(pairs, stride=self._stride)
        ]

    def _scores(
        self, pairs: list[tuple[str, str]], stride: int | None = None
    ) -> list[TextScore]:
        return self._run.score(
            pairs, longest=self._longest, stride=stride, watch=self._watch
        )

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Continues each context. Requests with equal settings are batched together."""
        groups: dict[_Settings, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(_settings(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for settings, numbers in groups.items():
            answers = self._run.complete(
                [requests[i].args[0] for i in numbers],
                stops=settings.stops,
                max_tokens=settings.max_tokens,
                sampling=settings.sampling,
                longest=self._longest,
            )
            for i, text in zip(numbers, answers, strict=True):
                texts[i] = text
        return texts


class _Settings(NamedTuple):
    """Settings of a request for text."""

    stops: tuple[str, ...]
    max_tokens: int
    sampling: SamplingConfig


def _settings(options: dict[str, Any]) -> _Settings:
    """Reads lm_eval's generation options; greedy unless `do_sample` is set."""
    until = options.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    lengths = [int(options[name]) for name in _LENGTH_OPTIONS if options.get(name)]
    temperature = 0.0
    if options.get("do_sample"):
        temperature = float(options.get("temperature", 1.0))
    sampling = SamplingConfig(
        temperature=temperature,
        top_k=int(options.get("top_k") or 0),
        top_p=float(options.get("top_p") or 1.0),
    )
    return _Settings(stops, lengths[0] if lengths else _DEFAULT_LENGTH, sampling)


def evaluate_tasks(
    run: TrainedRun,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,
    limit: int | None = None,
    longest: int | None = None,
    stride: int | None = None,
    watch: Watch | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluates tasks with lm_eval.

    Args:
      run: the loaded run.
      tasks: names of tasks in `folder`, which need no network, or of lm_eval's own
        tasks, which it downloads.
      folder: folder with task files; paths of data files in these are relative to it.
        None: the shipped tasks.
      limit: largest number of documents of each task; None: all.
      longest: longest text in tokens; None: the model's, as in `TrainedRun.score`.
      stride: tokens by which windows over whole texts (loglikelihood_rolling) move.
      watch: called with every batch that is scored.

    Returns:
      `{task: {metric: value}}`, as lm_eval computes them.

    Raises:
      ConfigError: there is no such folder or task, or the stride exceeds `longest`.
    """
    check_range(stride, longest or run.longest, "tokens read at once")
    folder = (folder or SHIPPED).resolve()
    if not folder.is_dir():
        raise ConfigError(
            f"--tasks-folder {folder}: no such folder; give one with task .yaml files"
        )
    manager = TaskManager(include_path=folder, include_defaults=False)
    if not set(tasks) <= set(manager.all_tasks):
        run.log(f"tasks: not all in {folder}; looking among lm_eval's own")
        manager = TaskManager(include_path=folder)
    known = manager.all_tasks
    unknown = [name for name in tasks if name not in known]
    if unknown:
        raise ConfigError(
            [f"--tasks {name}: no such task.{suggest(name, known)}" for name in unknown]
        )
    with contextlib.chdir(folder):  # lm_eval reads a task's data_files from here
        evaluated = simple_evaluate(
            RunModel(run, longest=longest, stride=stride, watch=watch),
            tasks=list(tasks),
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,
        )
    results: dict[str, dict[str, Any]] = evaluated["results"]
    return results
