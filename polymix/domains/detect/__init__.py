"""Objects in pictures: a dense detector and DETR with any mixer, COCO's and VOC's formats, average precision."""
