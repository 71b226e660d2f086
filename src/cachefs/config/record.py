"""Immutable records whose fields are checked one by one: the base of `MountConfig`.

A field is an annotation with a `Check`; `Field` gives its default and the text of the help. This
does what cachefs needs of pydantic, whose import and models took a third of a daemon's start.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_origin

_MISSING: Any = object()
_CLASS_VAR: Any = ClassVar


class FieldError(ValueError):
    """A refused value, or values that contradict each other.

    `place` is the key of the field, with the number of the entry and its key below that; it is
    empty if the error concerns several fields.
    """

    def __init__(self, text: str, place: tuple[str | int, ...] = ()) -> None:
        super().__init__(text)
        self.place = place


class Check:
    """Makes the value of a field from what a command line, a file or JSON gives."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """`function` takes the value that is given. It raises `ValueError`."""
        self._function = function

    def apply(self, value: object, field: "FieldInfo", others: Mapping[str, Any]) -> Any:
        """Return the checked value. `others` are the fields before this one, by name."""
        return self._function(value)


class CheckWithOthers(Check):
    """A check whose function also takes the checked fields before this one, by name."""

    def apply(self, value: object, field: "FieldInfo", others: Mapping[str, Any]) -> Any:
        return self._function(value, others)


class CheckOfWords(Check):
    """A check whose function also takes the words of the field's `Literal`."""

    def apply(self, value: object, field: "FieldInfo", others: Mapping[str, Any]) -> Any:
        return self._function(value, get_args(field.annotation))


class FieldInfo(NamedTuple):
    """The declaration of a field. `key` is its name where the values come from."""

    name: str
    key: str
    annotation: Any
    metadata: tuple[Any, ...]
    default: Any
    make_default: Callable[[Mapping[str, Any]], Any] | None
    description: str

    def check(self, value: object, others: Mapping[str, Any]) -> Any:
        """Return the checked value. Raises `FieldError`."""
        for each in self.metadata:
            if isinstance(each, Check):
                try:
                    value = each.apply(value, self, others)
                except FieldError as error:
                    raise FieldError(str(error), (self.key, *error.place)) from error
                except ValueError as error:
                    raise FieldError(str(error), (self.key,)) from error
        return value

    def default_with(self, others: Mapping[str, Any]) -> Any:
        """Return the default of a value that is not given. Raises `FieldError` if there is none."""
        if self.make_default is not None:
            return self.make_default(others)
        if self.default is _MISSING:
            raise FieldError("it is missing", (self.key,))
        return self.default


class _Declared(NamedTuple):
    default: Any
    make_default: Callable[[Mapping[str, Any]], Any] | None = None
    description: str = ""
    key: str | None = None


def Field(  # noqa: N802 - a declaration reads like a type
    default: Any = _MISSING,
    *,
    description: str = "",
    default_factory: Callable[[Mapping[str, Any]], Any] | None = None,
    alias: str | None = None,
) -> Any:
    """Declare a field: its default, or the function that makes it from the fields before, the text
    of the help, and the key if it is not the name."""
    return _Declared(default, default_factory, description, alias)


class Record:
    """Checked values. Immutable. Subclasses declare fields, and inherit those of their bases: the
    fields of the last base come first."""

    fields: ClassVar[dict[str, FieldInfo]] = {}
    """All fields by name, in the order in which they are checked."""
    given: frozenset[str]
    """The names of the fields that have no default."""

    def __init_subclass__(cls) -> None:
        own = {
            name: _field(name, annotation, cls.__dict__.get(name, _MISSING))
            for name, annotation in cls.__annotations__.items()
            if get_origin(annotation) is not _CLASS_VAR
        }
        for name in own.keys() & cls.__dict__.keys():
            delattr(cls, name)
        bases = [base for base in reversed(cls.__bases__) if issubclass(base, Record)]
        cls.fields = {name: field for base in bases for name, field in base.fields.items()} | own

    def __init__(self, values: object) -> None:
        """Check `values`, a mapping by key. Raises `FieldError`."""
        given: set[str] = set()
        checked: dict[str, Any] = {"given": given}
        try:
            rest = dict(self._prepared(values))
            for name, field in self.fields.items():
                if field.key in rest:
                    checked[name] = field.check(rest.pop(field.key), checked)
                    given.add(name)
                else:
                    checked[name] = self._default(field, checked)
            for key in rest:
                raise FieldError("there is no such field", (key,))
            self.__dict__.update(checked, given=frozenset(given))
            self._check_together()
        except FieldError:
            raise
        except ValueError as error:
            raise FieldError(str(error)) from error

    def _prepared(self, values: Any) -> Mapping[str, Any]:
        """Return the values to check. Raises `ValueError`."""
        if not isinstance(values, Mapping):
            raise ValueError("a table is wanted, with names and values")
        return values

    def _default(self, field: FieldInfo, others: Mapping[str, Any]) -> Any:
        """Return the value of a field that is not given; `others` are the checked fields before
        it. Raises `FieldError` if it must be given."""
        return field.default_with(others)

    def _check_together(self) -> None:
        """Compare fields with each other. Raises `ValueError`."""

    def values(self) -> dict[str, Any]:
        """Return all values, by key."""
        return {field.key: getattr(self, name) for name, field in self.fields.items()}

    def given_values(self) -> dict[str, Any]:
        """Return the values that are not defaults, by key."""
        given = {self.fields[name].key for name in self.given}
        return {key: value for key, value in self.values().items() if key in given}

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} can't be changed")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and other.values() == self.values()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.given_values()})"


def _field(name: str, annotation: Any, declared: Any) -> FieldInfo:
    """Return the field; `declared` is the result of `Field`, or the default itself."""
    if not isinstance(declared, _Declared):
        declared = _Declared(declared)
    metadata: tuple[Any, ...] = ()
    if get_origin(annotation) is Annotated:
        annotation, *rest = get_args(annotation)
        metadata = tuple(rest)
    key = declared.key or name
    return FieldInfo(
        name,
        key,
        annotation,
        metadata,
        declared.default,
        declared.make_default,
        declared.description,
    )
