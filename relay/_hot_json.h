/* The values of wal2json's JSON → cells, for _hot.c, which includes this.
 *
 * No JSON parser: a value stands where _hot.c knows that one must. As strict as orjson, or stricter: what orjson would
 * refuse, or Python would not take over as it stands (a number that a float would round), is declined. Each function
 * returns what is behind the thing that it read; NULL: declined.
 */

#ifndef RELAY_HOT_JSON_H
#define RELAY_HOT_JSON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

typedef struct {
    const char *at; /* NULL: SQL NULL */
    Py_ssize_t size;
} Cell;

static const char *
skip(const char *at, const char *end, const char *expected, Py_ssize_t size)
{
    return end - at >= size && !memcmp(at, expected, size) ? at + size : NULL;
}

static const char *
skip_digits(const char *at, const char *end)
{
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at;
}

/* Small enough to be finite, as orjson wants it. `whole`: an integer, which Python would print as it stands. */
static const char *
read_number(const char *at, const char *end, int *whole)
{
    int negative = at < end && *at == '-';
    const char *digits = at + negative;
    at = skip_digits(digits, end);
    /* 64 bits: 19 digits without a sign, 18 with one. */
    if (at == digits || at - digits > 19 - negative || (*digits == '0' && at - digits > 1))
        return NULL;
    *whole = !(negative && *digits == '0');
    if (at < end && *at == '.') {
        *whole = 0;
        digits = ++at;
        at = skip_digits(at, end);
        if (at == digits)
            return NULL;
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        *whole = 0;
        at++;
        if (at < end && (*at == '+' || *at == '-'))
            at++;
        digits = at;
        at = skip_digits(at, end);
        if (at == digits || at - digits > 2)
            return NULL;
    }
    return at;
}

/* The text behind an opening quote, without its escapes, into *room, which it moves on. There must be room for as many
 * bytes as the message has. NULL with an exception: no memory. */
static const char *
read_text(const char *at, const char *end, char **room, Cell *cell)
{
    char *begin = *room, *to = begin;
    unsigned char seen = 0;
    for (;; at++) {
        if (at >= end || (unsigned char)*at < 0x20)
            return NULL;
        if (*at == '"')
            break;
        if (*at != '\\') {
            seen |= (unsigned char)*at;
            *to++ = *at;
            continue;
        }
        if (++at >= end)
            return NULL;
        switch (*at) {
        case '"':
        case '\\':
            *to++ = *at;
            break;
        case 'n':
            *to++ = '\n';
            break;
        case 't':
            *to++ = '\t';
            break;
        case 'r':
            *to++ = '\r';
            break;
        case 'b':
            *to++ = '\b';
            break;
        case 'f':
            *to++ = '\f';
            break;
        default: /* \u: control characters, and they are rare */
            return NULL;
        }
    }
    if (seen & 0x80) { /* a database in SQL_ASCII sends any bytes */
        PyObject *proof = PyUnicode_DecodeUTF8(begin, to - begin, NULL);
        if (!proof) {
            if (PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
                PyErr_Clear();
            return NULL;
        }
        Py_DECREF(proof);
    }
    *cell = (Cell){begin, to - begin};
    *room = to;
    return at + 1;
}

/* One value, in Postgres' text form. One that is not wanted must be as valid, for Python reads the whole message. */
static const char *
read_value(const char *at, const char *end, int wanted, char **room, Cell *cell)
{
    int whole;
    const char *begin = at;
    switch (at < end ? *at : 0) {
    case '"':
        return read_text(at + 1, end, room, cell);
    case 'n':
        *cell = (Cell){NULL, 0};
        return skip(at, end, "null", 4);
    case 't':
        *cell = (Cell){"t", 1};
        return skip(at, end, "true", 4);
    case 'f':
        *cell = (Cell){"f", 1};
        return skip(at, end, "false", 5);
    default:
        at = read_number(at, end, &whole);
        if (!at || (wanted && !whole))
            return NULL;
        *cell = (Cell){begin, at - begin};
        return at;
    }
}

#endif
