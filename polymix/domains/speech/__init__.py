"""Speech: Conformers with any mixer, that learn texts by CTC or codes of masked frames by BEST-RQ."""
