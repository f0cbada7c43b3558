from small_runs import finished, finished_home

__all__ = ["finished", "finished_home"]
