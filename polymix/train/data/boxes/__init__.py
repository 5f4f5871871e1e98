"""What detection, instance segmentation and face detection share: annotated pictures, their formats, their measure."""
