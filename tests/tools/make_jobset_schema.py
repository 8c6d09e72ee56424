"""Makes tests/testdata/jobset_schema.json: the part of JobSet's schema that the manifests in deploy/ use.

    python tests/tools/make_jobset_schema.py CRD

CRD is config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of kubernetes-sigs/jobset (Apache-2.0), branch
release-0.10. It describes Jobs and Pods, too. Types, required fields, enumerations and patterns are kept; descriptions
and fields that no manifest has are left out. Kubernetes' rules in CEL (x-kubernetes-validations) are not checked.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "tests" / "testdata" / "jobset_schema.json"
KEPT = ("type", "enum", "pattern", "minimum", "maximum", "maxLength", "maxItems", "required", "anyOf", "format")


def used(schema: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """Returns a schema with the fields that some of the values have, which refuses all others."""
    part = {name: schema[name] for name in KEPT if name in schema}
    if "x-kubernetes-int-or-string" in schema:  # its own type, of Kubernetes
        part["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "items" in schema:
        part["items"] = used(schema["items"], [item for value in values for item in value])
    if isinstance(named := schema.get("additionalProperties"), dict):
        part["additionalProperties"] = used(named, [entry for value in values for entry in value.values()])
    if "properties" in schema:
        names = {name for value in values for name in value}
        if unknown := names - set(schema["properties"]):
            sys.exit(f"JobSet has no field {sorted(unknown)}")
        part["properties"] = {
            name: used(schema["properties"][name], [value[name] for value in values if name in value])
            for name in sorted(names)
        }
        part["additionalProperties"] = False
    return part


def main(crd: str) -> None:
    versions = yaml.safe_load(Path(crd).read_text())["spec"]["versions"]
    schema = next(version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1alpha2")
    # Kubernetes checks the metadata of all objects by itself.
    named = {"type": "string"}
    schema["properties"]["metadata"]["properties"] = {
        "name": named, "annotations": {"type": "object", "additionalProperties": named},
    }  # fmt: skip
    manifests = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "deploy").glob("*.yaml"))]
    OUTPUT.write_text(json.dumps(used(schema, manifests), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
