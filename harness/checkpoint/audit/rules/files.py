"""Define the rules for the files of a checkpoint: shards, index and configs.

There is one rule for each kind of problem that view.Checkpoint.survey reports: fatal kinds are
errors, tolerated kinds are warnings.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit.rules.rule import Level, Rule
from degarble.harness.checkpoint.read.types import ProblemKind

if TYPE_CHECKING:
    from collections.abc import Mapping

_FORMAT = "safetensors 0.8, format and tensor.rs"
_MISSING_SHARD = "fault B058: a missing shard loads without error"
_STATEMENTS = {
    ProblemKind.UNFINISHED: (
        "unfinished",
        "nothing writes to the checkpoint any more: the writer's mark is gone",
        "harness/checkpoint/write/manifest.py",
    ),
    ProblemKind.UNREADABLE_SHARD: (
        "unreadable_shard",
        "every shard is there, is a regular file, and keeps to the safetensors format",
        _FORMAT,
    ),
    ProblemKind.UNREADABLE_INDEX: ("unreadable_index", "the index can be read", _FORMAT),
    ProblemKind.UNREADABLE_CONFIG: (
        "unreadable_config",
        "config.json and hf_quant_config.json are JSON and describe a model that can be",
        "harness/model/config/json_file.py",
    ),
    ProblemKind.UNSAFE_NAME: (
        "unsafe_name",
        "the index names plain files in the checkpoint's own folder",
        "a name with `../` reads or writes elsewhere",
    ),
    ProblemKind.IN_TWO_SHARDS: (
        "tensor_in_two_shards",
        "a tensor lies in one shard; of two, the reader's order decides which one counts",
        _FORMAT,
    ),
    ProblemKind.NOT_IN_INDEX: (
        "not_in_index",
        "the index names every tensor of every shard; engines skip what it leaves out",
        _MISSING_SHARD,
    ),
    ProblemKind.NOT_IN_HEADER: (
        "not_in_header",
        "the shard that the index names has the tensor",
        _MISSING_SHARD,
    ),
    ProblemKind.IN_OTHER_SHARD: (
        "in_other_shard",
        "a tensor lies in the shard that the index names",
        _MISSING_SHARD,
    ),
    ProblemKind.STRAY_SHARD: (
        "stray_shard",
        "the index names every shard of the folder; some engines read all that they find",
        "shards of two revisions in one folder",
    ),
    ProblemKind.FOREIGN_LINK: (
        "foreign_link",
        "links stay inside the checkpoint, or inside the hub's own cache",
        "huggingface_hub: snapshots link to blobs",
    ),
    ProblemKind.UNPICKLED: (
        "pickled",
        "no file has to be unpickled; some engines prefer such files when both are there",
        "unpickling runs code",
    ),
    ProblemKind.TOTAL_SIZE: (
        "total_size",
        "total_size in the index is the sum of all tensors",
        "huggingface_hub: metadata of an index",
    ),
}

BY_KIND: Mapping[ProblemKind, Rule] = MappingProxyType(
    {
        kind: Rule(
            f"files.{name}", Level.ERROR if kind.is_fatal else Level.WARNING, statement, source
        )
        for kind, (name, statement, source) in _STATEMENTS.items()
    }
)
MANIFEST = Rule(
    "files.manifest",
    Level.ERROR,
    "files have the content hashes of manifest.json, where the checkpoint has one of ours",
    "harness/checkpoint/write/manifest.py; `convert` refuses the same file",
)
RULES = (*BY_KIND.values(), MANIFEST)
