"""Audio: sound files decoded to waveforms."""
