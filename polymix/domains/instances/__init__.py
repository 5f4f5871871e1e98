"""Objects with masks: Mask R-CNN with a mixer in its backbone, and the nuclei of a fluorescence microscope."""
