"""A trained run as a model of lm_eval (extra `eval`): its tasks, asked of our weights
on any mesh.

Load it with `extras.load`. What a request means is decided here; the work is
`TrainedRun`'s.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from jaxdist.config import ConfigError, suggest
from jaxdist.evaluation.held_out_set import check_range
from jaxdist.evaluation.trained_run import TrainedRun, Watch
from jaxdist.inference.decoding import SamplingConfig

# read offline; a task's own files are beside it
SHIPPED = Path(__file__).parent / "tasks"
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class RunModel(LM):
    """What lm_eval asks of a model. All processes of a group make the same calls."""

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
        """Returns (nats, whether greedy decoding gives it) of each continuation after
        its context.
        """
        return [
            (score.log_probability, score.greedy)
            for score in self._scores(r.args for r in requests)
        ]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Returns the nats of each whole text: in lm_eval's own windows, or in those of
        the stride.
        """
        scores = self._scores((("", *r.args) for r in requests), stride=self._stride)
        return [score.log_probability for score in scores]

    def _scores(self, pairs, **options):
        return self._run.score(
            list(pairs), longest=self._longest, watch=self._watch, **options
        )

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Returns each context's continuation; requests with equal settings go
        together.
        """
        groups: dict[tuple, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(_settings(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for (stops, most, sampling), numbers in groups.items():
            prompts = [requests[i].args[0] for i in numbers]
            options: dict[str, Any] = {
                "stops": stops,
                "max_tokens": most,
                "longest": self._longest,
            }
            answers = self._run.complete(prompts, sampling=sampling, **options)
            for i, text in zip(numbers, answers, strict=True):
                texts[i] = text
        return texts


def _settings(options: dict[str, Any]) -> tuple[tuple[str, ...], int, SamplingConfig]:
    """Returns stop strings, most tokens and sampling; greedy unless a task asks to
    sample.
    """
    until = options.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    most = next((int(options[name]) for name in _LENGTHS if options.get(name)), 256)
    temperature = (
        float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
    )
    sampling = SamplingConfig(
        temperature, int(options.get("top_k") or 0), float(options.get("top_p") or 1.0)
    )
    return stops, most, sampling


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
    """Returns `{task: {metric: value}}` as lm_eval computes them.

    Args:
      folder: of task files; a task's own data files are named relative to it. Default:
        those that are shipped. Names found there need no network; others are lm_eval's
        own, which it downloads.
      limit: documents of each task at most.
      longest: see `TrainedRun.score`.
      stride: of the windows that whole texts (loglikelihood_rolling) are scored in; see
        there.

    Raises:
      ConfigError: no such folder or task, or a stride beyond `longest`.
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
    with contextlib.chdir(folder):  # where a task's data_files are looked for
        evaluated = simple_evaluate(
            RunModel(run, longest=longest, stride=stride, watch=watch),
            tasks=list(tasks),
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,
        )
    return evaluated["results"]
