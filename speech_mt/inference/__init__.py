"""From a checkpoint to text without fairseq's commands: :func:`speech_mt.load`."""
