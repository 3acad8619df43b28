"""Scores of decoded text: BLEU and chrF (:mod:`.bleu`), word and character error rate (:mod:`.wer`).

Both start from :func:`.hypotheses.read_parallel`, which reads plain text and ``fairseq-generate`` output.
"""
