"""Where a study is kept, by URL. The only place that knows Optuna's storages by name.

    sqlite:///FILE                    the default; one machine
    postgresql://USER:PASSWORD@HOST/DB   any number of machines (the driver is psycopg 3)
    journal:FILE                      Optuna's append-only file; a shared disk will do
    grpc://HOST:PORT                  Optuna's proxy before one of the others, for very many workers
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autotune.errors import EnvironmentProblem, InputError
from autotune.tracking.store import hide_password, safe_uri

VARIABLE = "AUTOTUNE_STORAGE"
"""The URL for workers: a command line can be read by everybody on the machine, an environment cannot."""
KINDS = "sqlite:///FILE, postgresql://USER:PASSWORD@HOST/DATABASE, journal:FILE or grpc://HOST:PORT"


def optuna() -> Any:
    """The package, its chatter switched off.

    Raises:
        EnvironmentProblem: it is not installed.
    """
    try:
        import optuna as package
    except ImportError as error:
        raise EnvironmentProblem("optuna is not installed: pip install 'autotune-rl[sweep]'") from error
    package.logging.set_verbosity(logging.ERROR)
    warnings.simplefilter("ignore", package.exceptions.ExperimentalWarning)
    return package


def wanted(given: str | None, recipe_url: str | None, folder: Path) -> str:
    """The storage to use: the command line's, the environment's, the recipe's, else SQLite in the folder."""
    default = f"sqlite:///{folder / 'study.db'}"
    return given or os.environ.get(VARIABLE) or recipe_url or default


def open_storage(url: str) -> Any:
    """Connect.

    Raises:
        InputError: the URL is of no known kind, or nobody answers there; without its password.
        EnvironmentProblem: the driver is not installed.
    """
    package, (scheme, _, rest) = optuna(), url.partition(":")
    try:
        if scheme == "sqlite":
            Path(rest.lstrip("/") if rest.startswith("////") else rest[3:]).parent.mkdir(
                parents=True, exist_ok=True
            )
            return _relational(package, url, {"connect_args": {"timeout": 120}})
        if scheme in ("postgresql", "postgresql+psycopg"):
            _need("psycopg", "PostgreSQL")
            return _relational(package, f"postgresql+psycopg:{rest}", {"pool_pre_ping": True})
        if scheme == "journal":
            return _journal(package, Path(rest.removeprefix("//")))
        if scheme == "grpc":
            _need("grpc", "Optuna's gRPC proxy")
            return _proxy(package, url)
    except (InputError, EnvironmentProblem):
        raise
    except Exception as error:  # whatever a driver raises when nobody answers
        told = hide_password(str(error).splitlines()[0], url)
        raise InputError(f"the storage {safe_uri(url)} does not answer: {told}") from None
    raise InputError(f"received the storage {safe_uri(url)!r}; expected {KINDS}")


def _need(module: str, what: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise EnvironmentProblem(f"{what} needs {module}: pip install 'autotune-rl[sweep]'")


def _relational(package: Any, url: str, options: dict[str, Any]) -> Any:
    storage = package.storages.RDBStorage(url, engine_kwargs=options)
    if storage.engine.name == "sqlite":
        _one_at_a_time(storage.engine)
    return storage


def _one_at_a_time(engine: Any) -> None:
    """SQLite takes its lock at the first write, so two workers could read one trial as waiting and both claim
    it. With the lock from the beginning of every transaction, reading and claiming are one step."""
    from sqlalchemy import event

    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))


def _journal(package: Any, file: Path) -> Any:
    file.parent.mkdir(parents=True, exist_ok=True)
    journal = package.storages.journal
    return package.storages.JournalStorage(journal.JournalFileBackend(str(file)))


def _proxy(package: Any, url: str) -> Any:
    place = urlsplit(url)
    if not place.hostname or not place.port:
        raise InputError(f"received the storage {url!r}; expected grpc://HOST:PORT")
    proxy = package.storages.GrpcStorageProxy(host=place.hostname, port=place.port)
    proxy.wait_server_ready(timeout=30)
    return proxy
