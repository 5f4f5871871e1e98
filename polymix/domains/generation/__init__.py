"""Images out of noise: digits, pictures and latents, SiT and DiT with any mixer, samplers, Fréchet distances."""
