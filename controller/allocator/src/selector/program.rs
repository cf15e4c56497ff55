//! Programs for the interpreter.

use super::bridge::Bridge;
use super::functions::Native;
use super::meter::Stop;
use super::operator::Operator;
use super::regex::Regex;
use super::search::Search;
use super::value::{Key, Value};
use std::collections::HashSet;
use std::sync::Arc;

/// A program that can be evaluated.
#[derive(Debug)]
pub(super) struct Program {
    /// The root of the program.
    pub(super) root: Node,
    /// The estimated memory of the program, in bytes.
    pub(super) bytes: usize,
}

/// One of the two maps of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Facts {
    /// `device.attributes`
    Attributes,
    /// `device.capacity`
    Capacity,
}

/// The result that a macro over a list computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fold {
    All,
    Exists,
    ExistsOne,
    Collect,
}

/// A part of an expression.
#[derive(Debug)]
pub(super) enum Node {
    Constant(Value),
    /// A variable of a macro, by its position on the stack.
    Variable(usize),
    /// A name that is not declared.
    Unknown(Arc<str>),
    Device,
    /// A field of `device`.
    Field(Arc<str>),
    /// An attribute or a capacity by its name.
    Fact(Box<Fact>),
    And(Box<[Self]>),
    Or(Box<[Self]>),
    Not(Box<Self>),
    Negate(Box<Self>),
    Condition(Box<[Self; 3]>),
    Binary(Operator, Box<[Self; 2]>),
    InConstant(Box<(Self, HashSet<Key>, Value)>),
    Index(Box<[Self; 2]>),
    OptionalIndex(Box<[Self; 2]>),
    Has(Box<(Self, Arc<str>)>),
    /// Elements; the flag is true for an optional element.
    List(Box<[(Self, bool)]>),
    Map(Box<[(Self, Self, bool)]>),
    Fold(Box<Folding>),
    /// A variable's position on the stack, its value, and the expression in which it is bound.
    Bind(Box<(usize, Self, Self)>),
    Call(Native, Box<[Self]>),
    Search(Box<Searching>),
    /// A function of the library and its arguments, the target first.
    Bridge(Box<Bridge>, Box<[Self]>),
}

/// An access such as `device.attributes["domain"].name`.
#[derive(Debug)]
pub(super) struct Fact {
    pub(super) of: Facts,
    pub(super) domain: Arc<str>,
    pub(super) name: Arc<str>,
    pub(super) access: Access,
}

/// The way in which a fact is accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Value,
    Optional,
    Has,
}

/// A macro over a list or over the keys of a map.
#[derive(Debug)]
pub(super) struct Folding {
    pub(super) fold: Fold,
    pub(super) range: Node,
    /// Position of the variable on the stack.
    pub(super) variable: usize,
    pub(super) filter: Option<Node>,
    pub(super) body: Node,
}

/// A search for a regular expression that is a literal.
#[derive(Debug)]
pub(super) struct Searching {
    pub(super) search: Search,
    pub(super) text: Node,
    pub(super) most: Option<Node>,
    pub(super) regex: Result<Regex, Stop>,
}
