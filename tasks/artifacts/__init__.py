"""The artifact store: the truth about which stages are done (DESIGN section 4)."""

from tasks.artifacts.artifact import MANIFEST_NAME, Artifact, StoreError, hash_file
from tasks.artifacts.code import code_digest
from tasks.artifacts.stage_key import SHORT_KEY_LENGTH, StageKey, package_versions
from tasks.artifacts.store import ArtifactStore
from tasks.artifacts.verify import DamagedArtifact

__all__ = [
    "MANIFEST_NAME",
    "SHORT_KEY_LENGTH",
    "Artifact",
    "ArtifactStore",
    "DamagedArtifact",
    "StageKey",
    "StoreError",
    "code_digest",
    "hash_file",
    "package_versions",
]
