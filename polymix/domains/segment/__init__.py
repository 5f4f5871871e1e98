"""A class for every pixel of a picture: four layouts of data, three hosts with any mixer, mIoU."""
