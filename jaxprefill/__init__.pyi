from jaxprefill.config import EngineConfig as EngineConfig
from jaxprefill.embeddings import embedding_query as embedding_query
from jaxprefill.engine import Engine as Engine
from jaxprefill.errors import JaxPrefillError as JaxPrefillError
from jaxprefill.errors import RequestError as RequestError
from jaxprefill.request import Completion as Completion
from jaxprefill.request import SamplingParams as SamplingParams

__version__: str
