"""Series of numbers in time, and the files that hold them: csv, Parquet, the layouts of ETT and M4, .tsf and .ts."""
