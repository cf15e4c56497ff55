//! Reads an object without some of its parts: a deserializer between the text and the type.

use aliquot_model::config;
use serde::de::value::UnitDeserializer;
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess,
    Visitor,
};
use std::fmt;

/// The field in which an object stands, across lists, and a field of that object. The top-level object stands
/// in "".
pub(crate) type Place = (&'static str, &'static str);

/// Rules for fields that are read differently than their type would.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// Fields that the type sees as absent, whatever their value.
    pub(crate) left_out: [&'static [Place]; 2],
    /// Fields with opaque parameters, which are read within their bounds.
    pub(crate) opaque: &'static [Place],
}

impl Rules {
    fn places(self) -> impl Iterator<Item = Place> {
        self.left_out.into_iter().flatten().chain(self.opaque).copied()
    }

    /// Returns the static name of a field, if a place contains it; otherwise "".
    fn name(self, name: &str) -> &'static str {
        let mut names = self.places().flat_map(|(parent, field)| [parent, field]);
        names.find(|known| *known == name).unwrap_or_default()
    }

    fn is_left_out(self, place: Place) -> bool {
        self.left_out.into_iter().flatten().any(|known| *known == place)
    }

    fn is_opaque(self, place: Place) -> bool {
        self.opaque.contains(&place)
    }
}

/// A filter around a reader: a deserializer, a seed, a visitor, or access to a list or an object.
pub(crate) struct Filter<T> {
    pub(crate) inner: T,
    pub(crate) rules: Rules,
    /// The field in which the value stands.
    pub(crate) field: &'static str,
}

impl<T> Filter<T> {
    fn with<U>(&self, inner: U) -> Filter<U> {
        Filter { inner, rules: self.rules, field: self.field }
    }
}

/// The text states its own types, so the type's expectation is passed on only where it matters to serde.
impl<'de, D: Deserializer<'de>> Deserializer<'de> for Filter<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let visitor = self.with(visitor);
        self.inner.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let visitor = self.with(visitor);
        self.inner.deserialize_option(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let visitor = self.with(visitor);
        self.inner.deserialize_newtype_struct(name, visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_enum(name, variants, visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_ignored_any(visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Filter<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<S::Value, D::Error> {
        let from = self.with(from);
        self.inner.deserialize(from)
    }
}

/// Passes on scalar values.
macro_rules! pass_on {
    ($($visit:ident: $type:ty),+) => {
        $(fn $visit<E: Error>(self, value: $type) -> Result<V::Value, E> {
            self.inner.$visit(value)
        })+
    };
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Filter<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    pass_on!(
        visit_bool: bool, visit_i64: i64, visit_i128: i128, visit_u64: u64, visit_u128: u128, visit_f64: f64,
        visit_str: &str, visit_borrowed_str: &'de str, visit_string: String,
        visit_bytes: &[u8], visit_borrowed_bytes: &'de [u8], visit_byte_buf: Vec<u8>
    );

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, from: D) -> Result<V::Value, D::Error> {
        let from = self.with(from);
        self.inner.visit_some(from)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, from: D) -> Result<V::Value, D::Error> {
        let from = self.with(from);
        self.inner.visit_newtype_struct(from)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, from: A) -> Result<V::Value, A::Error> {
        let from = self.with(from);
        self.inner.visit_seq(from)
    }

    fn visit_map<A: MapAccess<'de>>(self, from: A) -> Result<V::Value, A::Error> {
        let from = Fields { inner: self.with(from), next: "" };
        self.inner.visit_map(from)
    }

    fn visit_enum<A: EnumAccess<'de>>(self, from: A) -> Result<V::Value, A::Error> {
        self.inner.visit_enum(from)
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Filter<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        let seed = self.with(seed);
        self.inner.next_element_seed(seed)
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

/// The fields of an object.
struct Fields<A> {
    inner: Filter<A>,
    /// The field whose value comes next.
    next: &'static str,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Fields<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        let name = Name { inner: seed, rules: self.inner.rules, name: &mut self.next };
        self.inner.inner.next_key_seed(name)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        let (rules, place) = (self.inner.rules, (self.inner.field, self.next));
        let from = &mut self.inner.inner;
        if rules.is_left_out(place) {
            from.next_value::<IgnoredAny>()?;
            let absent: UnitDeserializer<A::Error> = ().into_deserializer();
            return seed.deserialize(absent);
        }
        if rules.is_opaque(place) {
            let read = from.next_value_seed(Opaque)?;
            return seed.deserialize(read).map_err(A::Error::custom);
        }
        from.next_value_seed(Filter { inner: seed, rules, field: self.next })
    }
}

/// A seed that reads opaque parameters within their bounds.
struct Opaque;

impl<'de> DeserializeSeed<'de> for Opaque {
    type Value = serde_json::Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<serde_json::Value, D::Error> {
        config::read_within_bounds(from)
    }
}

/// Reads the name of a field and notes which field it is.
struct Name<'n, T> {
    inner: T,
    rules: Rules,
    name: &'n mut &'static str,
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Name<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<S::Value, D::Error> {
        let Self { inner, rules, name } = self;
        inner.deserialize(Name { inner: from, rules, name })
    }
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Name<'_, D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let Self { inner, rules, name } = self;
        inner.deserialize_str(Name { inner: visitor, rules, name })
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Name<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<V::Value, E> {
        *self.name = self.rules.name(name);
        self.inner.visit_str(name)
    }

    fn visit_borrowed_str<E: Error>(self, name: &'de str) -> Result<V::Value, E> {
        *self.name = self.rules.name(name);
        self.inner.visit_borrowed_str(name)
    }

    fn visit_string<E: Error>(self, name: String) -> Result<V::Value, E> {
        *self.name = self.rules.name(&name);
        self.inner.visit_string(name)
    }
}
