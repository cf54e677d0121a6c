"""An engine over HTTP, by SGLang's and OpenAI's routes: `rollstream serve`."""
