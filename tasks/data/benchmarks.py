"""Recognises benchmarks in training data: a registered set by name, a file by its problems."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from eval.problems.registry import SETS

# Digests of 32 problems of each benchmark, evenly spread over its test split.
_DIGESTS = {
    "math": (
        "679c2386 5628ed8c 90a7521c 91af7421 3ef10ffe da2a3545 72ae34df e24394f9 1ff66859 9d0c718e "
        "73e3d9d1 e3a92f82 27c34827 0f18e2f5 df179841 82dd5167 da896cf6 a2f7db23 a3119b69 960aa4b3 "
        "89499bff a03c1583 77d60bd0 c08abf58 8ffe4767 de6e4dca d752caa8 afd2ba5a 6f7d21a9 fe692454 "
        "e092d3a6 35c3a254"
    ),
    "gsm8k": (
        "07614cb7 41d78639 6b6db97e a79aeb6b f4cbb16f 3bd73fa6 2d10caef c9b3f42f 055eda71 67748cab "
        "cb5b683d 73bf4450 e8995fbb af689911 64c9c87b 556a4cc8 53422379 1b0eddec 8b077710 67265744 "
        "3f23e0b1 cdff2566 f2995620 b66eaabf 64e03391 198c395a 2699ed75 f842b6e9 64147ae0 a0d98e85 "
        "7908bb2e 339c95a4"
    ),
    "math500": (
        "ff2f3f7b 87adb663 9e875818 5da7ef1a 36764a24 38a6e4d9 e7ec45b9 1f8d9d25 7c43a639 b0d5637d "
        "9db02248 6fe104d2 a19a6f83 aa1bf795 916adeea 1dae43c9 04dfdb4a c1a75342 6972d2a0 ce9f6662 "
        "86a361e9 5673915b fe6fb6da 93abd4ff 10371659 5d965459 a4ac97a2 a63437cb 992e4fa7 c8bf0565 "
        "6f7a2517 4680d611"
    ),
    "aime24": (
        "5526f21f 70cdea3a fd8db68c 6b15c91c c1c33779 204e4e71 c9cb8e25 8bbffe88 05b2d67e 9c2eabcf "
        "4f5462a7 901a71c1 2e9695a6 4b522bc6 8149030e 35c6bef9 ffebebc3 7d6a2b91 e74a1678 1ca5c21b "
        "37d85bd4 9d35ea0c 1ac507b5 c4bb6abd bd26c8c8 f8b004f0 38fb8b7a a75e3c25 ebf7c70a 76592ce2"
    ),
    "aime25": (
        "f447bac6 2a123181 aa257572 48c56339 247c5e8a 7b9cb148 cbb96012 ecb140ab 7abcbef7 35a878a9 "
        "790019ae 0d96afdf f2eca437 cd96244f f4ac5934 13d0ac12 2bcd6152 e8be7ef5 2c447f7a 388bf99c "
        "17038b82 460d509c ba03ec32 7eb94224 e2cac7ed 395e05b6 5dce1f87 c5c11de2 b41c94c4 9b5ffd2a"
    ),
    "amc23": (
        "ef684d0c 02ae2655 e4f991f2 3584a5f3 e30faa3e a02fc88c 3a1ad92e 4b9e792f 7c411a64 a90ad959 "
        "4b34002d 3c86aa74 f364d020 d113a936 ddfc733e 88b18b71 3675c937 d70c21c7 f45060bf 426cb61d "
        "d4cad126 34f3980d a129f0bd 1e6b0631 3aac25b6 a5a7fc8e c21d8271 d8947e9d 4539b17c 50c8ce14 "
        "562092f1 ffbaf70c"
    ),
    "olympiadbench": (
        "10044f66 f4f07357 f73bdfb2 bc126956 88533eae 08f9eb6a a0d6c01e 0ac7b25e 4d748831 4d89b843 "
        "67a0f8fe 5b0d8563 2f6e1231 f26aeb0f 4b0efdb3 5a5bb811 b9727fbd 65320c54 a8d41d3a 9250cf8f "
        "954f43cd c8df0199 0dd97f53 37b27e0e 6e7e8fb9 e4612345 6628be78 06340349 ac786fd5 a5bdf84a "
        "f0b900be e9875002"
    ),
    "minerva": (
        "fe26fdab 65b61958 bd470448 ff193717 8afd6681 fb490883 b2bfc080 4cb2911f 4e3afd71 a4c6ab1a "
        "52e78405 533cf909 cb514492 0ed44132 3649f52e 106f8ae8 aaba860c 90bd80b7 035efd76 fb6c224a "
        "15abda26 d7f2e2f7 7773f132 fe5baaf8 072252c5 eff78439 253f8d4e b98e453b 6095197a 2de7ab77 "
        "19045e2e cc34cab9"
    ),
    "cflue": (
        "c49862d9 b93d133b 586d3e3f a2850077 ccc390c7 7260a28a 1e017751 6df364fe 15d87eec d17b76f4 "
        "f1e8bfa2 8c1b439f 4d0f03b5 37ad2899 e9e8ef50 9ccdf433 9d1c498e 40a93f08 d52bfd54 3c7f0c9b "
        "c6b50653 599250bb b14fd86f 34688c99 65b4ff2a 72193412 3a64082f 8a7923ad f557df0c 8a3fa938 "
        "abd35a34 57163901"
    ),
}
DIGEST_DIGITS = 8
_NO_WORD = re.compile(r"[\W_]+")
MIN_FOUND = 2
WHOLE, MAIN = 0.9, 0.5  # shares: of the benchmark's problems, and of the file's


def benchmark_of(name: str, texts: Sequence[str]) -> str | None:
    """Return the benchmark that these distinct problems of a set or file are or contain, if any.

    The training split of a registered set is none. A file contains a benchmark if nearly all of it
    is in the file, or if most of the file comes from it.
    """
    known = SETS.get(name)
    if known is not None and (not known.train or known.num_items == len(texts)):
        return name
    plain = [_NO_WORD.sub("", text.lower()) for text in texts]
    start, end = _shared_start(plain), _shared_start([text[::-1] for text in plain])
    found = {_digest(text) for text in plain}
    found |= {_digest(text[start : len(text) - end]) for text in plain}  # without instructions
    shares = {}
    for benchmark, digests in _DIGESTS.items():
        sample = digests.split()
        num_found = len(found.intersection(sample))
        share = num_found / len(sample)
        num_estimated = share * (SETS[benchmark].num_items or 0)
        if num_found >= MIN_FOUND and (share >= WHOLE or num_estimated >= MAIN * len(texts)):
            shares[benchmark] = share, num_estimated
    return max(shares, key=shares.__getitem__, default=None) or _by_name(name, len(texts))


def digest_of(text: str) -> str:
    """Return a digest of a problem's letters and digits."""
    return _digest(_NO_WORD.sub("", text.lower()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]


def _shared_start(texts: Sequence[str]) -> int:
    """Return with how many equal characters all texts begin."""
    first, last = min(texts, default=""), max(texts, default="")
    pairs = enumerate(zip(first, last, strict=False))
    return next((at for at, (one, other) in pairs if one != other), len(first))


def _by_name(name: str, num_problems: int) -> str | None:
    """Return the benchmark without digests that has the file's name and number of problems."""
    plain = "".join(filter(str.isalnum, Path(name).name.lower()))
    sizes = {known.name: known.num_items for known in SETS.values() if known.name not in _DIGESTS}
    named = [other for other in sizes if other.replace("-", "") in plain]
    return next((other for other in named if sizes[other] == num_problems), None)
