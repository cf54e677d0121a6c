"""The input file of a generator: prompt rows by position, each with its instance id."""

from collections.abc import Callable

from rollstream.buffer.generation_plan import check_distinct
from rollstream.buffer.items import InstanceId
from rollstream.config.settings import CustomClassSettings, DataSettings
from rollstream.data.prompts import PromptDataset, load_prompts
from rollstream.errors import ConfigError, DataError
from rollstream.trajectory import PromptRow

MakeRow = Callable[[PromptRow], PromptRow]
"""What a generator file may do to each row: other messages, a data source, a ground truth."""

LABELS = ("label", "ground_truth", "answer", "reward_model.ground_truth")
"""Where a row's ground truth may stand."""


class InputFile:
    """Prompt rows of a file of any format that rollstream reads; JSON Lines in slime.

    Beside rollstream's own names, a row may have slime's: `label` is the ground truth, and `instance_id`
    (a whole number or text) the group's name, the row's position by default.

    Args:
        path: the file.
        prompt_key: the column with the prompt.
        make_row: applied to each row.

    Raises:
        DataError: it cannot be read, its first row is bad, or two rows have one instance id.
        ConfigError: an instance id is of another type.
    """

    def __init__(self, path: str, *, prompt_key: str = "prompt", make_row: MakeRow | None = None) -> None:
        self._make_row = make_row
        self._dataset = _open(path, prompt_key)
        self.instance_ids = [self._instance_id(index) for index in range(len(self._dataset))]
        """By position."""
        check_distinct(self.instance_ids)

    def __len__(self) -> int:
        return len(self.instance_ids)

    def row(self, index: int) -> PromptRow:
        """One row. Raises `DataError` when it cannot be used."""
        row = self._dataset.row(index)
        if row.ground_truth is None and "label" in row.columns:
            row.ground_truth = row.columns.pop("label")
        return row if self._make_row is None else self._make_row(row)

    def _instance_id(self, index: int) -> InstanceId:
        try:
            columns = self._dataset.row(index).columns
        except DataError:
            return index  # its rollouts fail, each with this error
        instance_id = columns.get("instance_id", index)
        if type(instance_id) not in (int, str) or instance_id == "":
            raise ConfigError(
                f"{self._dataset.location(index)}: instance_id is {instance_id!r:.100}, want a whole number "
                "or a text"
            )
        return instance_id  # type: ignore[no-any-return]


def _open(path: str, prompt_key: str) -> PromptDataset:
    return load_prompts(
        DataSettings(
            train_files=[path],
            prompt_key=prompt_key,
            max_prompt_length=0,
            truncation="error",
            filter_overlong_prompts=False,
            train_max_samples=-1,
            shuffle=False,
            seed=0,
            apply_chat_template_kwargs={},
            tool_config_path=None,
            fetch_images=False,
            custom_cls=CustomClassSettings(path=None, name=None),
        )
    )
