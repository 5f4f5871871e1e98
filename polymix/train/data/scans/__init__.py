"""What the domains of LiDAR scans share: files of points, nuScenes' tables, a virtual LiDAR, pages that turn."""
