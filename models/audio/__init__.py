"""Audio: sound files decoded to waveforms of 16 kHz."""
