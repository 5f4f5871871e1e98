"""A class for every point of a scan: three layouts of data, PTv3 with any mixer, mIoU."""
