//! The reasons why an expression does not compile.

/// The reason why an expression does not compile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// The expression is longer than the API server accepts.
    #[error("it is {bytes} bytes long, the most is {most}")]
    TooLong {
        /// The length of the expression.
        bytes: usize,
        /// The most bytes.
        most: usize,
    },
    /// A part of the text is no token.
    #[error("at {at}: {error}")]
    Token {
        /// The position in the text, in bytes.
        at: usize,
        /// What is wrong with the part.
        error: TokenError,
    },
    /// A token is at a place where it cannot be.
    #[error("Syntax error: {wanted} was expected, {found} was found")]
    Unexpected {
        /// What was expected.
        wanted: &'static str,
        /// What was found.
        found: String,
    },
    /// Brackets and the like are nested too deeply.
    #[error("it is nested deeper than {most} levels; simplify it")]
    TooNested {
        /// The most levels.
        most: usize,
    },
    /// The tree has too many levels.
    #[error("it is nested deeper than {most} levels; split it into several selectors")]
    TooDeep {
        /// The most levels.
        most: usize,
    },
    /// An integer does not fit into 64 bits.
    #[error("the number is too large")]
    TooLargeNumber,
    /// An operator has no operand.
    #[error("an operand is missing")]
    NoOperand,
    /// The expression, or a part of it, is empty.
    #[error("the expression is empty")]
    Empty,
    /// The expression creates a message of a type that is not named here.
    #[error("messages are not supported")]
    Message,
    /// The expression creates a message of this type.
    #[error("messages such as {type_name}{{}} are not supported")]
    MessageOf {
        /// The type of the message.
        type_name: String,
    },
    /// A map has a field of a message.
    #[error("a map has a field in it")]
    FieldInMap,
    /// The argument of `has` is no selection.
    #[error("invalid argument to has() macro")]
    Has,
    /// A macro has too few or too many arguments.
    #[error("wrong number of arguments")]
    ArgumentCount,
    /// The variable of a macro is not a simple name.
    #[error("the first argument of a macro must be a simple name")]
    MacroVariable,
    /// An expanded macro does not have the form of any macro.
    #[error("a macro cannot be read")]
    Macro,
    /// The compiler panicked.
    #[error("the compiler gave up")]
    GaveUp,
}

/// The reason why a part of an expression is no token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// No token begins with this character.
    #[error("unexpected character {character:?}")]
    Character {
        /// The character.
        character: char,
    },
    /// A quoted name is not closed.
    #[error("a '`' is missing")]
    NameNotClosed,
    /// A string is not closed.
    #[error("a string is not closed: {quote} is missing")]
    StringNotClosed {
        /// The missing quote.
        quote: &'static str,
    },
    /// A string is not UTF-8.
    #[error("the string is not UTF-8")]
    NotUtf8,
    /// A string ends where an escape sequence begins.
    #[error("a string ends with a backslash")]
    EndsWithBackslash,
    /// No escape sequence begins with this character.
    #[error("\\{character} is not an escape sequence")]
    NoEscape {
        /// The character after the backslash.
        character: char,
    },
    /// An escape sequence has too few digits.
    #[error("an escape sequence has too few digits")]
    FewDigits,
    /// The number of an escape sequence is that of no character.
    #[error("an escape sequence is no character")]
    NoCharacter,
    /// An integer does not fit into 64 bits.
    #[error("the number is too large")]
    TooLargeNumber,
    /// A number with a fraction or an exponent cannot be read.
    #[error("the number cannot be read")]
    UnreadableNumber,
}
