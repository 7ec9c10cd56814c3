import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from ftrain.config import json_schema

CONFIGS = sorted(Path(__file__).parents[2].glob("configs/*.toml"))


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(json.dumps(json_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_is_valid(validator, path):
    validator.validate(tomllib.loads(path.read_text()))


@pytest.mark.parametrize(
    "change",
    [
        {"steps": "many"},
        {"stepss": 3},
        {"data": {"batch_size": "x"}},
        {"data": {"batch_sizes": 3}},
        {"optimizer": {"name": "momentum", "momentum": 0.9}},
        {"optimizer": {"name": "nothing", "learning_rate": 0.1}},
        {"optimizer": {"name": "adam", "learning_rate": {"name": "cosine_decay"}}},
        {"task": "nothing"},
        {"epochs": 3},  # and steps
        {"steps": "50%"},
        {"evaluation": {"every_steps": "often"}},
        {"precision": {"params": "bfloat16"}},
        {"step": {"remat": "everything"}},
    ],
)
def test_mistakes_are_found(validator, change):
    config = tomllib.loads(CONFIGS[0].read_text())
    assert not validator.is_valid(config | change)


def test_epochs_shares_and_a_precision_pass(validator):
    config = tomllib.loads(CONFIGS[0].read_text())
    del config["steps"]
    assert not validator.is_valid(config)
    validator.validate(
        config
        | {
            "epochs": 2.5,
            "evaluation": {"every_steps": "10%"},
            "summary": {"at_steps": ["50%", 3]},
            "precision": {"compute": "bfloat16"},
            "step": {"remat": "layers"},
        }
    )


def test_names_of_other_packages_pass(validator):
    config = tomllib.loads(CONFIGS[0].read_text())
    validator.validate(
        config | {"optimizer": {"name": "optax.lion", "learning_rate": 0.1, "b1": 0.8}}
    )
    validator.validate(config | {"task": "mine.module:task", "model": {"anything": 3}})


def test_a_config_that_extends_another_may_lack_keys_but_has_no_unknown_ones(validator):
    validator.validate({"extends": "a.toml", "optimizer": {"momentum": 0.8}, "data": {}})
    for wrong in ({"stepss": 3}, {"steps": "many"}, {"data": {"batch_sizes": 3}}):
        assert not validator.is_valid({"extends": "a.toml"} | wrong)
    assert not validator.is_valid({"extends": 3})
    assert not validator.is_valid({"optimizer": {"momentum": 0.8}})
