"""`orchestra schema`: the JSON Schema of a kind of file."""

from __future__ import annotations

import json
from argparse import Namespace


def main(options: Namespace) -> int:
    if options.kind == "experiment":
        from orchestra.experiments.schema import experiment_schema as schema_of
    else:
        from orchestra.cluster.schema import cluster_schema as schema_of
    print(json.dumps(schema_of(), indent=2))
    return 0
