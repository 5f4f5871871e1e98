"""Boxes around the objects of a LiDAR scan: nuScenes' tables and KITTI, DSVT with any mixer, CenterPoint, NDS."""
