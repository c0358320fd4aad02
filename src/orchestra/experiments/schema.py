"""The JSON Schema of an experiment file."""

from __future__ import annotations

from orchestra.experiments.experiment import Experiment
from orchestra.experiments.file import NOTATIONS, TRAINING_KEYS
from orchestra.settings import MAX_RANKS
from orchestra.settings.base import settings_of
from orchestra.settings.schema import DIALECT, Schema, object_schema, settings_schema
from orchestra.trainer.settings import Training

_TEXT: Schema = {"type": "string"}
_NOTATION: Schema = {"type": ["string", "null"]}


def experiment_schema() -> Schema:
    """Return the schema of an experiment file. Notations, such as strategies, are texts to it."""
    ranks = {"type": "integer", "minimum": 1, "maximum": MAX_RANKS}
    head = settings_schema(
        Experiment,
        {
            "task": _TEXT,
            "strategies": {"type": "object", "additionalProperties": _TEXT, "minProperties": 1},
            "ranks": {"anyOf": [ranks, {"type": "array", "items": ranks, "minItems": 1}]},
        },
        ("training",),
    )
    weights = {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}}
    others = {field.name for field in settings_of(Training)} - {*TRAINING_KEYS}
    training = settings_schema(
        Training,
        dict.fromkeys(NOTATIONS, _NOTATION)
        | {"optimizer": _TEXT, "shares": {"anyOf": [weights, _NOTATION]}},
        others,
    )
    match = {"type": "string", "description": "a pattern of names of parameters"}
    group = {"type": "object", "properties": {"match": match}, "required": ["match"]}
    groups = {
        "type": ["array", "null"],
        "items": group,
        "description": "arguments of the optimizer for parameters whose name matches",
    }
    properties = head["properties"] | training["properties"] | {"parameter_groups": groups}
    return {"$schema": DIALECT, "title": "An experiment file of Neural Orchestra"} | object_schema(
        properties, ("task", "strategies")
    )
