"""Settings as YAML text, in which nothing may stand twice: YAML's own rule is that the last one counts, in silence."""

from typing import Any

import yaml


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a name that stands twice in one mapping; what a merge (``<<``) brings may be overridden."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As PyYAML, after a look at the names."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise yaml.YAMLError(
                    f"{key.value} stands twice, in lines {lines[key.value]} and {line}: take one of them out"
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def settings_from(text: str) -> Any:
    """What a YAML text says.

    Raises:
        yaml.YAMLError: It is no YAML, or a name stands twice in it.
    """
    return yaml.load(text, _UniqueKeys)
