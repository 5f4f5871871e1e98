"""Several processes at once, as torchrun starts them."""


def statuses(processes, seconds):
    """The exit statuses of processes that start together; one that takes longer is killed."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
        process.kill()
    return [process.exitcode for process in processes]
