"""Lines of handwriting: IAM, LAM, READ 2016 and synthetic cheques, HTR-VT with any mixer, CTC, error rates."""
