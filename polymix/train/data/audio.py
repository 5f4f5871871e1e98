"""Audio files as samples of one rate, and samples as log-mel features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from polymix.errors import DataError, one_line
from polymix.extras import needs
from polymix.files import regular

AUDIO = frozenset({".wav", ".flac", ".ogg", ".mp3", ".opus", ".aiff", ".aif"})
HOP, WINDOW = 0.010, 0.025  # seconds from one frame to the next, and of a frame
ZEROS = 16  # of the sinc on either side
ROLL_OFF = 0.95  # of half the lower rate, where the filter's edge lies
FLOOR = 1e-6  # below every band of a quiet recording, so that digital silence is not far away from all else
MAX_AT_ONCE = 1 << 16  # samples that are resampled at once
SILENCE = 1e-4  # largest sample of a clip in which nothing is said: -80 dB
SHORTEST = 0.04  # seconds
WHAT, CURE = "speech of one channel", "Repair or remove it."


def library() -> Any:
    """The package that reads and writes audio files."""
    with needs("speech", "Audio is read with it."):
        import soundfile
    return soundfile


def sample_count(path: Path, rate: int) -> int:
    """The samples that `read` returns, by the header of a file.

    Raises DataError: it cannot be read; several channels, a lower rate, shorter than two frames.
    """
    try:
        header = library().info(str(regular(path)))
    except (OSError, RuntimeError, ValueError, TypeError) as error:  # soundfile's own are RuntimeErrors
        raise _unreadable(path, error) from error
    if header.channels != 1:
        cure = "Mix or split it, for example with ffmpeg -i IN.wav -ac 1 OUT.wav."
        raise DataError("data", f"{path}, which has {header.channels} channels", WHAT, cure)
    if header.samplerate < rate:
        got = f"{path}, which has {header.samplerate:,} samples a second, for a model of {rate:,}"
        raise DataError("data", got, f"at least rate={rate}", f"Train with rate={header.samplerate}, or remove it.")
    if header.duration < SHORTEST:
        raise DataError("data", f"{path}, which is {1000 * header.duration:.0f} ms long", WHAT, CURE)
    return math.ceil(header.frames * rate / header.samplerate)


def read(path: Path, rate: int) -> Tensor:
    """The samples (T) of a file at a rate, from -1 to 1.

    Raises DataError: what `sample_count` raises; samples that are no numbers; silence.
    """
    sample_count(path, rate)
    try:
        samples, own_rate = library().read(str(path), dtype="float32")
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise _unreadable(path, error) from error
    wave = torch.from_numpy(samples)
    if not wave.isfinite().all():
        raise DataError("data", f"{path}, which has samples that are no numbers", WHAT, CURE)
    if wave.abs().max() < SILENCE:
        raise DataError("data", f"{path}, which is silent", WHAT, CURE)
    return resampled(wave, own_rate, rate)


def _unreadable(path: Path, error: Exception) -> DataError:
    got = f"{path}, which cannot be read ({one_line(error)[:200]})"
    return DataError("data", got, "an audio file such as wav, flac or mp3", CURE)


def resampled(wave: Tensor, before: int, after: int) -> Tensor:
    """Samples (T) of one rate at another, by a windowed sinc of the frequencies below c:

        y[n] = Σ_t x[t] h(n / after - t / before),   h(s) ~ sinc(2cs) cos²(π s c / 16)    up to 16 zeros of the sinc

    with c the lower rate's half times 0.95, and each sum over h divided to be 1.
    """
    if before == after:
        return wave
    shared = math.gcd(before, after)
    down, up = before // shared, after // shared
    cut = ROLL_OFF * min(down, up) / 2  # with the rates divided by what they share
    reach = math.ceil(ZEROS * down / (2 * cut))
    phases = torch.arange(up)
    away = (phases * down % up / up)[:, None].double() - torch.arange(-reach, reach + 1)  # in samples of x
    turns = (away * cut / down).clamp(-ZEROS / 2, ZEROS / 2)
    kernel = torch.sinc(2 * turns) * torch.cos(turns * math.pi / ZEROS) ** 2
    kernel = (kernel / kernel.sum(1, keepdim=True)).to(wave)
    windows = pad(wave, (reach, reach)).unfold(0, 2 * reach + 1, 1)
    places = torch.arange(math.ceil(len(wave) * up / down))
    parts = [(windows[part * down // up] * kernel[part % up]).sum(1) for part in places.split(MAX_AT_ONCE)]
    return torch.cat(parts)


@dataclass(frozen=True)
class LogMel:
    """Samples (T) -> features (frames, bands): the natural logarithm of the power in each mel band, at least 1e-6.

    Frame n is that of samples n · hop up to n · hop + window, so that a stream has the same frames as the whole.
    """

    rate: int  # samples a second
    bands: int

    @property
    def hop(self) -> int:
        """Samples from one frame to the next: 10 ms."""
        return round(HOP * self.rate)

    @property
    def window(self) -> int:
        """Samples of a frame: 25 ms."""
        return round(WINDOW * self.rate)

    def frames(self, samples: int) -> int:
        """Frames of so many samples: those that lie within, and at least one."""
        return 1 + max(0, samples - self.window) // self.hop

    def __call__(self, wave: Tensor) -> Tensor:
        wave = pad(wave, (0, max(0, self.window - len(wave))))
        taper = torch.hann_window(self.window, dtype=wave.dtype, device=wave.device)
        spectrum = torch.stft(wave, self.window, self.hop, window=taper, center=False, return_complex=True)
        power = spectrum.real**2 + spectrum.imag**2
        bank = mel_bank(self.bands, self.window, self.rate).to(wave)
        with torch.autocast(wave.device.type, enabled=False):  # features are the same in any precision of the model
            return (bank @ power).clamp_min(FLOOR).log().T


@cache
def mel_bank(bands: int, window: int, rate: int) -> Tensor:
    """(bands, window // 2 + 1): triangles over the frequencies of a spectrum, evenly spaced on HTK's mel scale.

    mel(f) = 2595 log₁₀(1 + f / 700); each triangle reaches from its lower neighbour's peak to its upper neighbour's.
    """
    highest = 2595 * math.log10(1 + rate / 2 / 700)
    peaks = 700 * (10 ** (torch.linspace(0, highest, bands + 2, dtype=torch.float64) / 2595) - 1)
    frequencies = torch.linspace(0, rate / 2, window // 2 + 1, dtype=torch.float64)
    rising = (frequencies - peaks[:-2, None]) / (peaks[1:-1] - peaks[:-2])[:, None]
    falling = (peaks[2:, None] - frequencies) / (peaks[2:] - peaks[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp_min(0)
