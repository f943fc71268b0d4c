"""The record of the keys that a config file has assigned."""

import copy

import pytest
from ml_collections import ConfigDict

from jaxdist.config import files
from jaxdist.config.assigned import RecordingConfig, assigned_keys
from jaxdist.trainer.run_config import default_config

VALUES = {"seed": 0, "data": {"source": "stdlib", "path": ""}, "model": {}}


def changed(change) -> set[str]:
    config = RecordingConfig(VALUES).lock()
    change(config)
    return assigned_keys(config)


def unlocked(config: ConfigDict, name: str, value: object) -> None:
    with config.unlocked():
        config[name] = value


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (lambda c: None, set()),
        # the value of the default is assigned, too
        (lambda c: setattr(c.data, "source", "stdlib"), {"data.source"}),
        (lambda c: c.data.update(path="a"), {"data.path"}),
        (lambda c: c.update({"data": {"path": "a"}}), {"data.path"}),
        (lambda c: c.update_from_flattened_dict({"data.path": "a"}), {"data.path"}),
        (
            lambda c: setattr(c, "data", {"source": "a", "path": "b"}),
            {"data.source", "data.path"},
        ),
        (lambda c: unlocked(c, "model", {"depth": 2}), {"model.depth"}),
        (lambda c: unlocked(c.model, "depth", 2), {"model.depth"}),
        (lambda c: c.__setitem__("seed", 1), {"seed"}),
    ],
)
def test_keys_are_recorded_however_they_are_assigned(change, keys):
    assert changed(change) == keys


def test_the_default_config_has_no_assigned_key_and_copies_keep_the_record():
    config = default_config()
    assert assigned_keys(config) == set()
    config.data.source = "text"
    copies = (copy.deepcopy(config), config.copy_and_resolve_references())
    assert [assigned_keys(copied) for copied in copies] == [{"data.source"}] * 2
    assert config.to_dict()["data"]["source"] == "text"


def test_all_keys_of_a_config_from_elsewhere_are_assigned():
    assert assigned_keys(ConfigDict({"a": {"b": 1}, "c": 2})) == {"a.b", "c"}


def test_a_dataclass_of_a_file_has_assigned_what_differs_from_its_defaults(tmp_path):
    file = tmp_path / "typed.py"
    file.write_text(
        "from jaxdist.trainer.run_config import BatchConfig, RunConfig\n"
        "def get_config(): return RunConfig(seed=3, batch=BatchConfig(global_size=8))\n"
    )
    assert assigned_keys(files.load(str(file), folders=())) == {
        "seed",
        "batch.global_size",
    }


def test_a_packaged_config_is_told_from_a_file(tmp_path, monkeypatch):
    folders = files.packaged_folders()
    assert files.is_packaged("quickstart", folders=folders)
    assert files.is_packaged("gpt2-124m:tiny", folders=folders)
    assert files.is_packaged(str(folders[0] / "quickstart.py"), folders=folders)
    own = tmp_path / "quickstart.py"
    own.write_text("from jaxdist import default_config as get_config\n")
    assert not files.is_packaged(str(own), folders=folders)
