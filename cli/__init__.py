"""The command line: `logitless serve | generate | bench | plan | devices | selftest | tokenize | synth`."""
