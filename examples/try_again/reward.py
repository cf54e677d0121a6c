"""A right answer is worth 1, less for each try that went before it."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Scores the last answer."""
    tries = len(extra_info["turn_scores"])
    right = solution_str.strip() == str(ground_truth)
    return {"score": right * (1.0 - 0.2 * (tries - 1)), "tries": tries}
