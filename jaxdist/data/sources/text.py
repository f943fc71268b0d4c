"""Text files (`data.source=text`): each file is a document."""

from jaxdist.data.sources.documents import Corpus, SourceOptions
from jaxdist.data.sources.files import corpus_of, find_files, read_text


def open_corpus(options: SourceOptions) -> Corpus:
    """Finds the text files of `data.path`.

    Raises:
      ConfigError: an entry finds nothing.
    """
    return corpus_of(options.name, find_files(options), read_text)
