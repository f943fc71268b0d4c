"""Runs as models of lm_eval: requests, shipped tasks, a user's task, the command."""

import json
import math
import random

import pytest

pytest.importorskip("lm_eval", reason='needs pip install -e ".[eval]"')

from lm_eval.api.instance import Instance

from jaxdist import evaluate
from jaxdist.config import ConfigError
from jaxdist.evaluation import lm_eval
from jaxdist.inference.decoding import SamplingConfig
from support.inference import (  # noqa: F401  pytest finds the fixtures here
    TOP,
    alone_fixture,
    command_fixture,
    here_fixture,
    trained_fixture,
)

GREEDY = SamplingConfig(temperature=0.0)


def requests(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def lines():
    return [
        json.loads(line) for line in (lm_eval.SHIPPED / "python_lines.jsonl").open()
    ]


def test_requests_are_answered_in_their_order(here):
    model = lm_eval.RunModel(here)
    pairs = [
        ("the cat", " sat"),
        ("", "a dog"),
        ("old ", "trees past the mat" * 4),
        ("x", ""),
    ]
    scores = here.score(pairs)
    assert len({score.log_probability for score in scores}) == 4
    asked = requests("loglikelihood", *pairs)
    assert model.loglikelihood(asked) == [(s.log_probability, s.greedy) for s in scores]
    texts = [text for _, text in pairs[:3]]
    whole = [
        score.log_probability for score in here.score([("", text) for text in texts])
    ]
    assert (
        model.loglikelihood_rolling(
            requests("loglikelihood_rolling", *zip(texts, strict=True))
        )
        == whole
    )


def test_generation_settings_are_lm_evals(here):
    sampled = {
        "do_sample": True,
        "temperature": TOP.temperature,
        "top_k": TOP.top_k,
        "max_gen_toks": 8,
    }
    asked = [
        ("the cat", {"until": ["\0"], "max_gen_toks": 12}),
        ("a dog", {**sampled, "until": []}),
        (
            "the mat",
            {"until": "\0", "max_gen_toks": 12, "do_sample": False, "temperature": 0.9},
        ),
    ]
    found = lm_eval.RunModel(here).generate_until(requests("generate_until", *asked))
    greedy = here.complete(
        ["the cat", "the mat"], stops=["\0"], max_tokens=12, sampling=GREEDY
    )
    (drawn,) = here.complete(["a dog"], max_tokens=8, sampling=TOP)
    assert found == [greedy[0], drawn, greedy[1]]
    assert drawn != here.complete(["a dog"], max_tokens=8, sampling=GREEDY)[0]
    assert lm_eval._settings({})[1:] == (256, GREEDY)


def test_the_shipped_tasks_give_what_their_scores_say(here, alone):
    names = ["python_lines", "python_lines_bits", "python_lines_written"]
    found = [lm_eval.evaluate_tasks(run, names) for run in (here, alone)]
    assert here.mesh.size == 8
    assert alone.mesh.size == 1
    rows, right, nats, size = lines(), 0, 0.0, 0
    assert len(rows) == 24
    assert {row["answer"] for row in rows} == {0, 1, 2, 3}
    for row in rows:
        assert len(row["choices"]) == len(set(row["choices"])) == 4
        scores = alone.score([(row["before"], choice) for choice in row["choices"]])
        nearest = max(range(4), key=lambda i: scores[i].log_probability)
        right += nearest == row["answer"]
        whole = row["before"] + row["choices"][row["answer"]]
        nats += alone.score([("", whole)])[0].log_probability
        size += len(whole.encode())
    for results in found:
        assert results["python_lines"]["acc,none"] == pytest.approx(right / 24)
        bits = results["python_lines_bits"]["bits_per_byte,none"]
        assert bits == pytest.approx(-nats / size / math.log(2), rel=1e-5)
        assert 0 <= results["python_lines_written"]["exact_match,stripped"] <= 1
    limited = lm_eval.evaluate_tasks(alone, names[:1], limit=8)["python_lines"]
    assert limited["acc,none"] * 8 % 1 == 0
    assert limited["sample_len"] == 8


def test_a_users_folder_and_the_command(trained, here, command, tmp_path):
    rows = [
        {"text": " ".join(random.Random(i).choices(["cat", "dog", "mat"], k=20))}
        for i in range(3)
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: mine.jsonl}}\n"
        "test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: '{{text}}'\nmetric_list: [{metric: bits_per_byte}]\n"
    )
    flags = ("--workdir", trained[0], "--tasks", "mine", "--tasks-folder", tmp_path)
    code, out, _ = command(evaluate.main, *flags, "--json")
    found = json.loads(out)
    nats = [here.score([("", row["text"])])[0].log_probability for row in rows]
    assert (code, found["step"]) == (0, 4)
    bits = -sum(nats) / math.log(2) / sum(len(row["text"]) for row in rows)
    assert found["tasks"]["mine"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    code, out, _ = command(evaluate.main, *flags)
    assert code == 0
    assert out.split() == ["mine", "bits_per_byte", f"{bits:.4f}"]
    # Read eight tokens at a time, a text is predicted from less: another number.
    code, out, _ = command(evaluate.main, *flags, "--json", "--max-length", 8)
    less = [
        here.score([("", row["text"])], longest=8)[0].log_probability for row in rows
    ]
    assert json.loads(out)["tasks"]["mine"]["bits_per_byte,none"] == pytest.approx(
        -sum(less) / math.log(2) / sum(len(row["text"]) for row in rows), rel=1e-5
    )
    assert sum(less) != pytest.approx(sum(nats), rel=1e-3)
    code, out, _ = command(
        evaluate.main, *flags, "--json", "--max-length", 8, "--stride", 3
    )
    more = [
        here.score([("", row["text"])], longest=8, stride=3)[0].log_probability
        for row in rows
    ]
    assert json.loads(out)["tasks"]["mine"]["bits_per_byte,none"] == pytest.approx(
        -sum(more) / math.log(2) / sum(len(row["text"]) for row in rows), rel=1e-5
    )
    # ten times what is allowed above
    assert sum(more) != pytest.approx(sum(less), rel=1e-4)
    with pytest.raises(
        ConfigError, match="stride=9: required 1 to 8, tokens read at once"
    ):
        command(evaluate.main, *flags, "--max-length", 8, "--stride", 9)
    with pytest.raises(ConfigError, match="no such task"):
        command(evaluate.main, *flags[:2], "--tasks", "python_linez,mine", "--limit", 1)
    with pytest.raises(ConfigError, match="no such folder"):
        command(evaluate.main, *flags[:4], "--tasks-folder", tmp_path / "none")
