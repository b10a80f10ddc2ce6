"""Kubernetes's own schemas, from the published package kubernetes-validate."""

from __future__ import annotations

import json
import zipfile
from typing import Any

from tests.wheels import wheel

FOLDER = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict"


def refusals(kind: str, value: Any) -> list[str]:
    """Return the errors of Kubernetes 1.37 for an object such as a `podtemplatespec-v1`, unknown
    fields included.

    Skips the test if the package index cannot be reached.
    """
    import jsonschema
    from referencing import Registry, Resource
    from referencing.jsonschema import DRAFT202012

    with zipfile.ZipFile(wheel("kubernetes-validate", "1.37.0")) as archive:

        def read(uri: str) -> Resource[Any]:
            return Resource(
                json.loads(archive.read(f"{FOLDER}/{uri.rpartition('/')[2]}")), DRAFT202012
            )

        registry = Registry(retrieve=read)  # type: ignore[call-arg]
        checker = jsonschema.Draft202012Validator(read(f"{kind}.json").contents, registry=registry)
        return [f"{error.json_path}: {error.message}" for error in checker.iter_errors(value)]
