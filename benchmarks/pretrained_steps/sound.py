"""Sound to train and to measure on: recordings, synthetic voices, and windows of 30 s filled with them."""

from __future__ import annotations

import ctypes
import random
import wave
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polymix.errors import DataError

Sound = NDArray[np.float32]  # one channel, between -1 and 1
RATE, WINDOW = 16_000, 30  # samples a second, seconds: what Whisper hears
TELEPHONE = 8_000
ACCENTS = ("en-us", "en", "en-gb-x-rp", "en-gb-scotland", "en-us-nyc", "en-029", "en-gb-x-gbcwmd")
TIMBRES = (
    *(f"m{at}" for at in range(1, 9)), *(f"f{at}" for at in range(1, 6)), "Andrea", "Annie", "Michael", "Mike", "adam",
    "belinda", "benjamin", "boris", "caleb", "david", "ed", "edward", "ian", "john", "linda", "max", "norbert", "pablo",
    "paul", "quincy", "rob", "robert", "sandro", "shelby", "steph", "travis", "victor", "zac",
)  # fmt: skip
SPEED, PITCH = (120, 200), (30, 70)  # words a minute; of 0 to 100
SYNCHRONOUS, UTF8, SPEED_OPTION, PITCH_OPTION = 2, 1, 1, 3  # of eSpeak NG's C interface
REAL = 0.25  # share of the windows that a person speaks
FILLED, PAUSE, PEAK, SNR = (3.0, 28.0), (0.2, 0.8), (0.1, 0.9), (8.0, 40.0)  # seconds, seconds, of 1, decibels


def read_sound(path: Path, rate: int = RATE) -> Sound:
    """A WAV file of 16-bit samples. Raises DataError for another rate, several channels, or no samples."""
    try:
        with wave.open(str(path)) as file:
            found, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise DataError("sound", f"{path}, which cannot be read ({error})", "a WAV file", "Convert it.") from error
    if found != rate:
        raise DataError("sound", f"{path} of {found:,} Hz", f"{rate:,} Hz", "Resample it.")
    if (channels, width) != (1, 2):
        got = f"{path} with {channels} channels of {8 * width} bits"
        raise DataError("sound", got, "one channel of 16 bits", "Mix it down, or convert it.")
    samples = np.frombuffer(content, "<i2")
    if not len(samples):
        raise DataError("sound", f"{path} of length 0", "at least one sample", "Leave it out.")
    return samples.astype(np.float32) / 32768


def resampled(sound: Sound, before: int) -> Sound:
    from scipy.signal import resample_poly

    common = int(np.gcd(before, RATE))
    return np.asarray(resample_poly(sound, RATE // common, before // common), np.float32)


class Synthesizer:
    """Voices of eSpeak NG, from its shared library and data in a folder."""

    def __init__(self, folder: Path) -> None:
        self.library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
        self.parts: list[NDArray[np.int16]] = []
        self.rate = self.library.espeak_Initialize(SYNCHRONOUS, 0, str(folder / "espeak-ng-data").encode(), 0)
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self.callback = kind(self._take)  # referred to for as long as the library may call it
        self.library.espeak_SetSynthCallback(self.callback)

    def _take(self, samples: ctypes._Pointer[ctypes.c_short], count: int, _: int) -> int:
        if count:
            self.parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def voice(self, draw: random.Random) -> None:
        name = f"{draw.choice(ACCENTS)}+{draw.choice(TIMBRES)}"
        if self.library.espeak_SetVoiceByName(name.encode()):
            raise DataError("voice", name, "one that eSpeak NG has", "Use the version that is pinned.")
        for option, (least, most) in ((SPEED_OPTION, SPEED), (PITCH_OPTION, PITCH)):
            self.library.espeak_SetParameter(option, draw.randint(least, most), 0)

    def say(self, text: str) -> Sound:
        self.parts.clear()
        raw = text.encode()
        self.library.espeak_Synth(raw, ctypes.c_size_t(len(raw) + 1), 0, 1, 0, UTF8, None, None)
        self.library.espeak_Synchronize()
        return resampled(np.concatenate(self.parts).astype(np.float32) / 32768, self.rate)


def windows(say: Synthesizer, texts: Sequence[str], real: Sequence[Sound], count: int, seed: int) -> Iterator[Sound]:
    """Up to 28 s of one voice each, with noise: three of four read sentences, in the fourth a person speaks."""
    draw = random.Random(seed)
    for _ in range(count):
        if draw.random() < REAL:
            yield window(lambda: draw.choice(real), draw)
        else:
            say.voice(draw)
            yield window(lambda: say.say(draw.choice(texts)), draw)


def window(utter: Callable[[], Sound], draw: random.Random) -> Sound:
    """Utterances one after another, until the next would be too long, at a volume and with noise that are drawn."""
    limit = int(draw.uniform(*FILLED) * RATE)
    parts = [utter()[: WINDOW * RATE]]
    while True:
        pause = np.zeros(int(draw.uniform(*PAUSE) * RATE), np.float32)
        more = [pause, utter()]
        if sum(map(len, [*parts, *more])) > limit:
            break
        parts += more
    return noisy(np.concatenate(parts), draw)


def noisy(sound: Sound, draw: random.Random) -> Sound:
    """With noise whose power falls with the frequency to a power between 0 and 2, at a ratio and volume drawn."""
    size = 1 << len(sound).bit_length()  # for the transform, which is slow for some lengths
    white = np.random.default_rng(draw.getrandbits(32)).standard_normal(size)
    spectrum = np.fft.rfft(white)
    spectrum[1:] /= np.arange(1, len(spectrum)) ** (draw.uniform(0, 2) / 2)
    spectrum[0] = 0
    noise = np.fft.irfft(spectrum, size)[: len(sound)]
    power = [float(np.square(each).mean()) + 1e-12 for each in (sound, noise)]
    mixed = sound + noise * np.sqrt(power[0] / power[1] / 10 ** (draw.uniform(*SNR) / 10))
    return np.asarray(mixed * draw.uniform(*PEAK) / max(float(np.abs(mixed).max()), 1e-9), np.float32)
