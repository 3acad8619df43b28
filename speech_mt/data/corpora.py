"""Where parallel text comes from: several corpora as one, and the test sets that sacrebleu knows."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from sacrebleu.dataset import DATASETS

from speech_mt.data.stage import atomic_path
from speech_mt.data.text import count_lines
from speech_mt.errors import InputError


def concatenate(corpora: Mapping[str, Sequence[Path]], outputs: Sequence[Path]) -> dict[str, int]:
    """Write several parallel corpora one after another; line k of every output belongs together.

    Args:
        corpora: name -> its files, one a language.
        outputs: a file a language, in the same order.

    Returns:
        the lines of each corpus.

    Raises:
        InputError: the files of a corpus have unequal numbers of lines. One line too few would shift all that follow,
            and a surplus in the next corpus could hide it.
    """
    lines = {name: [count_lines(path) for path in paths] for name, paths in corpora.items()}
    for name, counts in lines.items():
        if len(set(counts)) > 1:
            found = " and ".join(f"{n:,} in {path}" for n, path in zip(counts, corpora[name], strict=True))
            raise InputError(f"{name}: unequal numbers of lines, {found}: line k of both must be translations")
    for i, output in enumerate(outputs):
        with atomic_path(output) as temporary, open(temporary, "wb") as file:
            for paths in corpora.values():
                with open(paths[i], "rb") as part:
                    shutil.copyfileobj(part, file)
                    part.seek(-1, 2)
                    if part.read() != b"\n":
                        file.write(b"\n")
    return {name: counts[0] for name, counts in lines.items()}


def write_test_set(name: str, languages: tuple[str, str], prefix: Path) -> str:
    """Write ``prefix.<source>`` and ``prefix.<target>`` of a test set that sacrebleu knows; return a line about it.

    sacrebleu downloads it once, to ~/.sacrebleu or $SACREBLEU, and checks its MD5. Further references, of sets that
    have several, are left out: score with ``sacrebleu -t`` to use them.

    Args:
        name: such as ``wmt13`` (newstest2013) or ``wmt14/full`` (newstest2014, all of its 3,003 sentences).
        languages: source and target.
        prefix: of the files to write.

    Raises:
        InputError: no such set or language pair; it cannot be downloaded.
    """
    pair = "-".join(languages)
    if name not in DATASETS:
        raise InputError(f"sacrebleu knows no test set {name}; `sacrebleu --list` names them")
    dataset = DATASETS[name]
    if pair not in dataset.langpairs:
        raise InputError(f"sacrebleu's test set {name} has no {pair}, only {', '.join(sorted(dataset.langpairs))}")
    try:
        files = dataset.get_source_file(pair), dataset.get_reference_files(pair)[0]
    except (OSError, SystemExit, EOFError) as error:
        raise InputError(f"sacrebleu cannot download {name} {pair}: {error}; try again, or give local files") from None
    lines = concatenate({name: [Path(file) for file in files]}, [Path(f"{prefix}.{side}") for side in languages])
    return f"{lines[name]:,} sentences of {name} {pair}"
