"""Words spoken by eSpeak NG, in a process of its own: its library keeps a state that would change the next words.

    python -m polymix.train.data.espeak OUT.npz < REQUEST.json

writes what `spoken` reads.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from polymix.errors import DataError, printable
from polymix.extras import check_installed

RATE = 22_050  # samples a second
SEED = 1  # of the sounds that are noise
SYNCHRONOUS, UTF8, RATE_OPTION, PITCH_OPTION = 2, 1, 1, 3  # of speak_lib.h
Manner = tuple[int, int]  # words a minute, and pitch from 0 to 99
Samples = NDArray[numpy.int16]


def spoken(words: Sequence[str], voices: Sequence[str], manners: Sequence[Manner], path: Path) -> list[Samples]:
    """The samples of words: in every voice, and there in every manner, all of them, one after another.

    Args:
        path: of a file that is written, an npz.
    Raises:
        MissingExtraError: without espeakng-loader. DataError: the synthesiser fails.
    """
    check_installed("espeakng_loader", extra="speech", why="The default data are spoken with it.")
    request = json.dumps({"words": words, "voices": voices, "manners": manners})
    command = [sys.executable, "-m", "polymix.train.data.espeak", str(path)]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        got = f"eSpeak NG, which fails: {printable(last)[:200]}"
        raise DataError("data", got, "a synthesiser for the default data", "Pass data of your own.")
    with numpy.load(path) as arrays:
        return [arrays[str(place)] for place in range(len(arrays.files))]


def _speak(words: Sequence[str], voices: Sequence[str], manners: Sequence[Manner]) -> list[Samples]:
    import espeakng_loader

    engine: Any = ctypes.cdll.LoadLibrary(str(espeakng_loader.get_library_path()))
    pieces: list[Samples] = []

    def hear(samples: Any, count: int, events: Any) -> int:
        if samples and count:
            pieces.append(numpy.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)(hear)
    if engine.espeak_Initialize(SYNCHRONOUS, 0, str(espeakng_loader.get_data_path()).encode(), 0) != RATE:
        raise RuntimeError("it does not start")
    engine.espeak_SetSynthCallback(callback)
    engine.espeak_ng_SetRandSeed(ctypes.c_long(SEED))
    bank = []
    for voice in voices:
        if engine.espeak_SetVoiceByName(voice.encode()):
            raise RuntimeError(f"it has no voice {voice}")
        for rate, pitch in manners:
            engine.espeak_SetParameter(RATE_OPTION, rate, 0)
            engine.espeak_SetParameter(PITCH_OPTION, pitch, 0)
            for word in words:
                pieces.clear()
                text = word.encode()
                engine.espeak_Synth(text, len(text) + 1, 0, 0, 0, UTF8, None, None)
                bank.append(numpy.concatenate(pieces))
    return bank


if __name__ == "__main__":
    arrays: dict[str, Any] = {str(place): wave for place, wave in enumerate(_speak(**json.load(sys.stdin)))}
    numpy.savez(sys.argv[1], **arrays)
