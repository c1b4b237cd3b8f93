"""Audio: sound files, waveforms, spectrograms and the encoders of sounds."""
