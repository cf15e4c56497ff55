//! Parses text into a tree, as cel-go's parser does with optional syntax switched on.
//!
//! The parser of the `cel` crate is not used for two reasons. It visits what follows an even number of `!`
//! twice, so nesting takes time without bound. It also follows chains by recursion without bound. This parser
//! takes time and stack in proportion to the text.

use super::compile_error::CompileError;
use super::depth::node;
use super::lex::{Token, tokens};
use super::macros;
use super::tree::{call, text_literal};
use cel::common::ast::{
    CallExpr, EntryExpr, Expr, IdedEntryExpr, IdedExpr, ListExpr, LiteralValue, MapEntryExpr, MapExpr,
    SelectExpr, operators,
};

/// The longest expression, in bytes, that the API server accepts (`CELSelectorExpressionMaxLength`).
pub(super) const LONGEST: usize = 10 * 1024;

/// The most levels of brackets and the like.
const MOST_NESTED: usize = 250;

/// Parses an expression. The `id` of each node is the number of levels below it.
pub(super) fn parse(source: &str) -> Result<IdedExpr, CompileError> {
    if source.len() > LONGEST {
        return Err(CompileError::TooLong { bytes: source.len(), most: LONGEST });
    }
    let mut parser = Parser { tokens: tokens(source)?.into_iter(), next: Token::End, nested: 0 };
    parser.advance();
    let tree = parser.expression()?;
    if parser.next == Token::End { Ok(tree) } else { Err(parser.unexpected("the end")) }
}

struct Parser {
    tokens: std::vec::IntoIter<Token>,
    next: Token,
    nested: usize,
}

impl Parser {
    fn advance(&mut self) -> Token {
        let next = self.tokens.next().unwrap_or(Token::End);
        std::mem::replace(&mut self.next, next)
    }

    fn at(&self, sign: &str) -> bool {
        matches!(self.next, Token::Sign(next) if next == sign)
    }

    fn take(&mut self, sign: &str) -> bool {
        let found = self.at(sign);
        if found {
            self.advance();
        }
        found
    }

    fn want(&mut self, sign: &'static str) -> Result<(), CompileError> {
        if self.take(sign) { Ok(()) } else { Err(self.unexpected(sign)) }
    }

    fn unexpected(&self, wanted: &'static str) -> CompileError {
        let found = match &self.next {
            Token::Name(name) => name.clone(),
            Token::Sign(sign) => (*sign).to_owned(),
            Token::End => "nothing".to_owned(),
            _ => "a literal".to_owned(),
        };
        CompileError::Unexpected { wanted, found }
    }

    fn nest<T>(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Result<T, CompileError>,
    ) -> Result<T, CompileError> {
        self.nested += 1;
        if self.nested > MOST_NESTED {
            return Err(CompileError::TooNested { most: MOST_NESTED });
        }
        let result = inner(self);
        self.nested -= 1;
        result
    }

    fn expression(&mut self) -> Result<IdedExpr, CompileError> {
        self.nest(|parser| {
            let condition = parser.logical(operators::LOGICAL_OR)?;
            if !parser.take("?") {
                return Ok(condition);
            }
            let yes = parser.logical(operators::LOGICAL_OR)?;
            parser.want(":")?;
            let no = parser.expression()?;
            node(call(operators::CONDITIONAL, vec![condition, yes, no]))
        })
    }

    /// Parses the operands of `||` or `&&` into a tree with as few levels as possible.
    fn logical(&mut self, operator: &'static str) -> Result<IdedExpr, CompileError> {
        let or = operator == operators::LOGICAL_OR;
        let mut operands = Vec::new();
        loop {
            operands.push(if or { self.logical(operators::LOGICAL_AND)? } else { self.relation()? });
            if !self.take(if or { "||" } else { "&&" }) {
                return balanced(operator, operands);
            }
        }
    }

    fn relation(&mut self) -> Result<IdedExpr, CompileError> {
        let mut left = self.sum()?;
        loop {
            let operator = match &self.next {
                Token::Sign("<") => operators::LESS,
                Token::Sign("<=") => operators::LESS_EQUALS,
                Token::Sign(">") => operators::GREATER,
                Token::Sign(">=") => operators::GREATER_EQUALS,
                Token::Sign("==") => operators::EQUALS,
                Token::Sign("!=") => operators::NOT_EQUALS,
                Token::Name(name) if name == "in" => operators::IN,
                _ => return Ok(left),
            };
            self.advance();
            left = node(call(operator, vec![left, self.sum()?]))?;
        }
    }

    fn sum(&mut self) -> Result<IdedExpr, CompileError> {
        let mut left = self.product()?;
        loop {
            let operator = match &self.next {
                Token::Sign("+") => operators::ADD,
                Token::Sign("-") => operators::SUBSTRACT,
                _ => return Ok(left),
            };
            self.advance();
            left = node(call(operator, vec![left, self.product()?]))?;
        }
    }

    fn product(&mut self) -> Result<IdedExpr, CompileError> {
        let mut left = self.unary()?;
        loop {
            let operator = match &self.next {
                Token::Sign("*") => operators::MULTIPLY,
                Token::Sign("/") => operators::DIVIDE,
                Token::Sign("%") => operators::MODULO,
                _ => return Ok(left),
            };
            self.advance();
            left = node(call(operator, vec![left, self.unary()?]))?;
        }
    }

    fn unary(&mut self) -> Result<IdedExpr, CompileError> {
        for (sign, operator) in [("!", operators::LOGICAL_NOT), ("-", operators::NEGATE)] {
            let mut count = 0;
            while self.take(sign) {
                count += 1;
            }
            if count == 0 {
                continue;
            }
            // As in upstream, an even number of signs cancels out.
            let operand =
                if sign == "-" && count == 1 && matches!(self.next, Token::Int(_) | Token::Double(_)) {
                    let negative = self.literal(true)?;
                    return self.members(negative);
                } else {
                    self.member()?
                };
            return if count % 2 == 0 { Ok(operand) } else { node(call(operator, vec![operand])) };
        }
        self.member()
    }

    fn member(&mut self) -> Result<IdedExpr, CompileError> {
        let operand = self.nest(Self::primary)?;
        self.members(operand)
    }

    /// Parses the selections, look-ups and calls that follow an operand.
    fn members(&mut self, mut operand: IdedExpr) -> Result<IdedExpr, CompileError> {
        loop {
            if self.take(".?") {
                let field = text_literal(&self.name()?);
                operand = node(call(operators::OPT_SELECT, vec![operand, field]))?;
            } else if self.take(".") {
                let name = self.name()?;
                operand = if self.take("(") {
                    let args = self.arguments()?;
                    let call = CallExpr { func_name: name, target: Some(Box::new(operand)), args };
                    macros::expand(call)?
                } else {
                    node(Expr::Select(SelectExpr { operand: Box::new(operand), field: name, test: false }))?
                };
            } else if self.at("[") || self.at("[?") {
                let optional = self.advance() == Token::Sign("[?") || self.take("?");
                let operator = if optional { operators::OPT_INDEX } else { operators::INDEX };
                let position = self.expression()?;
                self.want("]")?;
                operand = node(call(operator, vec![operand, position]))?;
            } else if self.at("{") {
                return Err(CompileError::Message);
            } else {
                return Ok(operand);
            }
        }
    }

    fn name(&mut self) -> Result<String, CompileError> {
        match self.advance() {
            Token::Name(name) => Ok(name),
            other => {
                self.next = other;
                Err(self.unexpected("a name"))
            }
        }
    }

    fn arguments(&mut self) -> Result<Vec<IdedExpr>, CompileError> {
        let mut args = Vec::new();
        if self.take(")") {
            return Ok(args);
        }
        loop {
            args.push(self.expression()?);
            if !self.take(",") {
                break;
            }
        }
        self.want(")")?;
        Ok(args)
    }

    fn primary(&mut self) -> Result<IdedExpr, CompileError> {
        self.take(".");
        if self.take("(") {
            let inner = self.expression()?;
            self.want(")")?;
            return Ok(inner);
        }
        if self.take("[") || self.at("[?") {
            return self.list();
        }
        if self.take("{") {
            return self.map();
        }
        match &self.next {
            Token::Name(name) if !matches!(name.as_str(), "true" | "false" | "null" | "in") => {
                let name = self.name()?;
                if self.take("(") {
                    let call = CallExpr { func_name: name, target: None, args: self.arguments()? };
                    return macros::expand(call);
                }
                node(Expr::Ident(name))
            }
            _ => self.literal(false),
        }
    }

    fn literal(&mut self, negative: bool) -> Result<IdedExpr, CompileError> {
        let value = match self.advance() {
            Token::Int(value) => {
                let signed = if negative { -i128::from(value) } else { i128::from(value) };
                let value = i64::try_from(signed).map_err(|_| CompileError::TooLargeNumber)?;
                LiteralValue::Int(value.into())
            }
            Token::Uint(value) => LiteralValue::UInt(value.into()),
            Token::Double(value) => LiteralValue::Double(if negative { -value } else { value }.into()),
            Token::Text(value) => LiteralValue::String(value.as_str().into()),
            Token::Bytes(value) => LiteralValue::Bytes(value.into()),
            Token::Name(name) if name == "true" => LiteralValue::Boolean(true.into()),
            Token::Name(name) if name == "false" => LiteralValue::Boolean(false.into()),
            Token::Name(name) if name == "null" => LiteralValue::Null,
            other => {
                self.next = other;
                return Err(self.unexpected("an expression"));
            }
        };
        node(Expr::Literal(value))
    }

    /// Parses a list, after its `[`.
    fn list(&mut self) -> Result<IdedExpr, CompileError> {
        let (mut elements, mut optional) = (Vec::new(), Vec::new());
        if self.take("[?") {
            optional.push(0);
            elements.push(self.expression()?);
            if !self.take(",") {
                self.want("]")?;
                return node(Expr::List(ListExpr::new_with_optionals(elements, optional)));
            }
        }
        while !self.take("]") {
            if self.take("?") {
                optional.push(elements.len());
            }
            elements.push(self.expression()?);
            if !self.take(",") {
                self.want("]")?;
                break;
            }
        }
        node(Expr::List(ListExpr::new_with_optionals(elements, optional)))
    }

    /// Parses a map, after its `{`.
    fn map(&mut self) -> Result<IdedExpr, CompileError> {
        let mut entries = Vec::new();
        while !self.take("}") {
            let optional = self.take("?");
            let key = self.expression()?;
            self.want(":")?;
            let value = self.expression()?;
            let expr = EntryExpr::MapEntry(MapEntryExpr { key, value, optional });
            entries.push(IdedEntryExpr { id: 0, expr });
            if !self.take(",") {
                self.want("}")?;
                break;
            }
        }
        node(Expr::Map(MapExpr { entries }))
    }
}

fn balanced(operator: &str, mut operands: Vec<IdedExpr>) -> Result<IdedExpr, CompileError> {
    while operands.len() > 1 {
        let mut halved = Vec::with_capacity(operands.len().div_ceil(2));
        let mut rest = operands.into_iter();
        while let Some(left) = rest.next() {
            halved.push(match rest.next() {
                Some(right) => node(call(operator, vec![left, right]))?,
                None => left,
            });
        }
        operands = halved;
    }
    operands.pop().ok_or(CompileError::NoOperand)
}
