/* The hot path in C: pgoutput's messages, and wal2json's rows, → Events; Events → fenced NATS frames.
 *
 * Optional: without it everything works the same, only slower. The Python code is the reference; what is written here
 * covers the shapes that nearly every row has, and declines the rest: it stops in front of a message or event that it is
 * not sure of, and Python goes on from there (and finds the words for what is wrong). So nothing here raises for bad
 * data, and nothing here may ever accept what Python refuses. tests/unit/test_hot.py and test_hot_wal2json.py compare
 * the two.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_hot_json.h"

#define MAX_WIDTH 64
#define KEPT_SCRATCH (1 << 20) /* bytes that a Reader keeps from one call to the next */
#define XLOG_HEADER 25 /* of XLogData: 'w', two LSNs, a time */
#define EVENT_FIELDS 9 /* id, topic, key, header_names, header_values, body, table, transaction, ordinal */
#define TRANSACTION_FIELDS 4 /* xid, commit_lsn, committed_at, stamp */
#define PG_EPOCH 946684800.0 /* 2000-01-01 in Unix time: Postgres counts microseconds from there */

enum { EVENT_ID = -1, POSITION = -2 };       /* in place of a place, among the header values */
enum { RAW = 0, TEXT = 1, TIMESTAMPTZ = 2 }; /* how a cell enters the body */

typedef struct {
    PyObject_HEAD
    PyTypeObject *event;     /* the NamedTuple */
    PyObject *names, *table; /* what all events of the table share */
    PyObject *topics;        /* dict: cell, or tuple of cells, that decide the topic → topic; filled by Python */
    uint32_t oid;            /* pgoutput's name of the table */
    PyObject *between[MAX_WIDTH + 1]; /* of wal2json: the bytes before, between and behind the values; else NULL */
    char *scratch;                    /* the texts of one message without their escapes */
    Py_ssize_t scratch_size;
    int columns, width;
    int slots[MAX_WIDTH]; /* place of each column, -1: not wanted */
    int id, row_headers, key, otherwise; /* places */
    int topic_count, topic_places[MAX_WIDTH];
    int value_count;
    int value_places[MAX_WIDTH];
    PyObject *constants[MAX_WIDTH]; /* values that are always the same */
    int piece_count;
    PyObject *literals[MAX_WIDTH]; /* pieces of the body: these bytes, then the cell of the place */
    int piece_places[MAX_WIDTH], piece_kinds[MAX_WIDTH];
    PyObject *recent[MAX_WIDTH]; /* the last value seen at a place: many rows repeat it */
} Reader;

static uint32_t
read_uint32(const unsigned char *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static uint64_t
read_uint64(const unsigned char *at)
{
    return (uint64_t)read_uint32(at) << 32 | read_uint32(at + 4);
}

/* The cell as bytes; the same object as last time if it is the same text. */
static PyObject *
cell_bytes(Reader *self, const Cell *cells, int place)
{
    const Cell *cell = &cells[place];
    PyObject *known = self->recent[place];
    if (known && PyBytes_GET_SIZE(known) == cell->size && !memcmp(PyBytes_AS_STRING(known), cell->at, cell->size))
        return Py_NewRef(known);
    PyObject *fresh = PyBytes_FromStringAndSize(cell->at, cell->size);
    if (fresh)
        Py_XSETREF(self->recent[place], Py_NewRef(fresh));
    return fresh;
}

/* 1: the row is in `cells`; 0: not a row that is read here. Of pgoutput. */
static int
split(const Reader *self, const unsigned char *data, Py_ssize_t size, Cell *cells)
{
    const unsigned char *at = data + XLOG_HEADER, *end = data + size;
    if (size < XLOG_HEADER + 8 || data[0] != 'w' || at[0] != 'I' || read_uint32(at + 1) != self->oid || at[5] != 'N' ||
        (at[6] << 8 | at[7]) != self->columns)
        return 0;
    at += 8;
    memset(cells, 0, sizeof(Cell) * self->width);
    for (int i = 0; i < self->columns; i++) {
        if (at >= end)
            return 0;
        if (*at == 'n') {
            at++;
            continue;
        }
        if (*at != 't' || end - at < 5)
            return 0;
        uint32_t length = read_uint32(at + 1);
        at += 5;
        if ((uint64_t)(end - at) < length)
            return 0;
        if (self->slots[i] >= 0)
            cells[self->slots[i]] = (Cell){(const char *)at, (Py_ssize_t)length};
        at += length;
    }
    return at == end;
}

/* The same of wal2json: the message must have the known bytes around its values, to the last one. The cells point into
 * the message and into the scratch memory. 0 with an exception: no memory. */
static int
split_json(Reader *self, const char *data, Py_ssize_t size, Cell *cells)
{
    if (size < XLOG_HEADER || data[0] != 'w')
        return 0;
    if (size > self->scratch_size) {
        char *larger = PyMem_Realloc(self->scratch, size);
        if (!larger) {
            PyErr_NoMemory();
            return 0;
        }
        self->scratch = larger;
        self->scratch_size = size;
    }
    const char *at = data + XLOG_HEADER, *end = data + size;
    char *room = self->scratch;
    memset(cells, 0, sizeof(Cell) * self->width);
    for (int i = 0;; i++) {
        at = skip(at, end, PyBytes_AS_STRING(self->between[i]), PyBytes_GET_SIZE(self->between[i]));
        if (!at || i == self->columns)
            return at == end;
        Cell cell;
        at = read_value(at, end, self->slots[i] >= 0, &room, &cell);
        if (!at)
            return 0;
        if (self->slots[i] >= 0 && cell.at)
            cells[self->slots[i]] = cell;
    }
}

/* Whether JSON can quote the text without escapes; what is not ASCII must be proved to be UTF-8, so Python looks. */
static int
is_plain(const Cell *cell)
{
    for (Py_ssize_t i = 0; i < cell->size; i++) {
        unsigned char c = (unsigned char)cell->at[i];
        if (c < 0x20 || c >= 0x7f || c == '"' || c == '\\')
            return 0;
    }
    return 1;
}

/* New reference; NULL without an exception: declined. */
static PyObject *
make_body(const Reader *self, const Cell *cells)
{
    Py_ssize_t total = 0;
    for (int i = 0; i < self->piece_count; i++) {
        total += PyBytes_GET_SIZE(self->literals[i]);
        if (self->piece_places[i] < 0)
            continue;
        const Cell *cell = &cells[self->piece_places[i]];
        switch (self->piece_kinds[i]) {
        case TEXT:
            if (cell->at && !is_plain(cell))
                return NULL;
            total += cell->at ? cell->size + 2 : 4;
            break;
        case TIMESTAMPTZ: /* 2026-11-16 04:13:30.12+00 */
            if (!cell->at || cell->size < 14 || cell->at[10] != ' ' || memcmp(cell->at + cell->size - 3, "+00", 3))
                return NULL;
            total += cell->size; /* less +00, more Z and two quotes */
            break;
        default:
            if (!cell->at)
                return NULL;
            total += cell->size;
        }
    }
    PyObject *body = PyBytes_FromStringAndSize(NULL, total);
    if (!body)
        return NULL;
    char *to = PyBytes_AS_STRING(body);
    for (int i = 0; i < self->piece_count; i++) {
        Py_ssize_t length = PyBytes_GET_SIZE(self->literals[i]);
        memcpy(to, PyBytes_AS_STRING(self->literals[i]), length);
        to += length;
        if (self->piece_places[i] < 0)
            continue;
        const Cell *cell = &cells[self->piece_places[i]];
        if (!cell->at) {
            memcpy(to, "null", 4);
            to += 4;
        }
        else if (self->piece_kinds[i] == RAW) {
            memcpy(to, cell->at, cell->size);
            to += cell->size;
        }
        else {
            *to++ = '"';
            memcpy(to, cell->at, cell->size);
            to += cell->size;
            if (self->piece_kinds[i] == TIMESTAMPTZ) {
                to[10 - cell->size] = 'T';
                to -= 3;
                *to++ = 'Z';
            }
            *to++ = '"';
        }
    }
    return body;
}

/* Borrowed reference; NULL without an exception: not known yet. */
static PyObject *
find_topic(Reader *self, const Cell *cells)
{
    PyObject *key;
    if (self->topic_count == 1 && cells[self->topic_places[0]].at)
        key = cell_bytes(self, cells, self->topic_places[0]);
    else if (self->topic_count == 1)
        key = Py_NewRef(Py_None);
    else {
        key = PyTuple_New(self->topic_count);
        for (int i = 0; key && i < self->topic_count; i++) {
            int place = self->topic_places[i];
            PyObject *part = cells[place].at ? cell_bytes(self, cells, place) : Py_NewRef(Py_None);
            if (!part)
                Py_CLEAR(key);
            else
                PyTuple_SET_ITEM(key, i, part);
        }
    }
    if (!key)
        return NULL;
    PyObject *topic = PyDict_GetItemWithError(self->topics, key);
    Py_DECREF(key);
    return topic;
}

static PyObject *
joined(PyObject *front, const char *rest, int length)
{
    Py_ssize_t size = PyBytes_GET_SIZE(front);
    PyObject *made = PyBytes_FromStringAndSize(NULL, size + length);
    if (made) {
        memcpy(PyBytes_AS_STRING(made), PyBytes_AS_STRING(front), size);
        memcpy(PyBytes_AS_STRING(made) + size, rest, length);
    }
    return made;
}

/* New reference; NULL without an exception: declined. */
static PyObject *
make_values(Reader *self, const Cell *cells, PyObject *event_id, PyObject *stamp, long ordinal)
{
    PyObject *values = PyTuple_New(self->value_count);
    if (!values)
        return NULL;
    for (int i = 0; i < self->value_count; i++) {
        int place = self->value_places[i];
        PyObject *value = NULL;
        if (self->constants[i])
            value = Py_NewRef(self->constants[i]);
        else if (place == EVENT_ID)
            value = Py_NewRef(event_id);
        else if (place == POSITION) {
            char digits[24];
            value = joined(stamp, digits, PyOS_snprintf(digits, sizeof digits, "%ld", ordinal));
        }
        else if (cells[place].at)
            value = cell_bytes(self, cells, place);
        if (!value) {
            Py_DECREF(values);
            return NULL;
        }
        PyTuple_SET_ITEM(values, i, value);
    }
    PyObject_GC_UnTrack(values); /* bytes only: it is in no cycle */
    return values;
}

/* New reference; NULL without an exception: declined. */
static PyObject *
make_event(Reader *self, const Cell *cells, PyObject *transaction, PyObject *stamp, long ordinal)
{
    const Cell *id = &cells[self->id];
    if (!id->at || !id->size || cells[self->row_headers].at)
        return NULL;
    PyObject *topic = find_topic(self, cells);
    if (!topic)
        return NULL;
    PyObject *event_id = PyBytes_FromStringAndSize(id->at, id->size);
    PyObject *values = event_id ? make_values(self, cells, event_id, stamp, ordinal) : NULL;
    PyObject *body = values ? make_body(self, cells) : NULL;
    int place = cells[self->key].size ? self->key : self->otherwise;
    PyObject *key = !body ? NULL : cells[place].size ? cell_bytes(self, cells, place) : Py_NewRef(Py_None);
    PyObject *number = key ? PyLong_FromLong(ordinal) : NULL;
    PyObject *event = number ? self->event->tp_alloc(self->event, EVENT_FIELDS) : NULL;
    if (!event) {
        Py_XDECREF(event_id);
        Py_XDECREF(values);
        Py_XDECREF(body);
        Py_XDECREF(key);
        Py_XDECREF(number);
        return NULL;
    }
    PyTuple_SET_ITEM(event, 0, event_id);
    PyTuple_SET_ITEM(event, 1, Py_NewRef(topic));
    PyTuple_SET_ITEM(event, 2, key);
    PyTuple_SET_ITEM(event, 3, Py_NewRef(self->names));
    PyTuple_SET_ITEM(event, 4, values);
    PyTuple_SET_ITEM(event, 5, body);
    PyTuple_SET_ITEM(event, 6, Py_NewRef(self->table));
    PyTuple_SET_ITEM(event, 7, Py_NewRef(transaction));
    PyTuple_SET_ITEM(event, 8, number);
    PyObject_GC_UnTrack(event); /* nothing in it points back to it */
    return event;
}

/* 0: declined, or with an exception. */
static int
append_event(Reader *self, const Cell *cells, PyObject *transaction, PyObject *stamp, long ordinal, PyObject *events)
{
    PyObject *event = make_event(self, cells, transaction, stamp, ordinal);
    if (!event)
        return 0;
    int failed = PyList_Append(events, event);
    Py_DECREF(event);
    return !failed;
}

PyDoc_STRVAR(read_doc, "read(messages, at, transaction, stamp, ordinal, events) -> int\n\n"
                       "Append the events of wal2json's rows from `at` on; returns where it stopped.");

static PyObject *
Reader_read(Reader *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 6 || !self->between[0] || !PyList_Check(args[0]) || !PyBytes_Check(args[3]) || !PyList_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "read(list, int, Transaction, bytes, int, list), of wal2json");
        return NULL;
    }
    PyObject *messages = args[0], *events = args[5];
    Py_ssize_t at = PyLong_AsSsize_t(args[1]);
    long ordinal = PyLong_AsLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    Cell cells[MAX_WIDTH];
    for (; at < PyList_GET_SIZE(messages); at++, ordinal++) {
        PyObject *data = PyList_GET_ITEM(messages, at);
        if (!PyBytes_Check(data) || !split_json(self, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), cells) ||
            !append_event(self, cells, args[2], args[3], ordinal, events))
            break;
    }
    if (self->scratch_size > KEPT_SCRATCH) { /* one large message is no reason to keep so much for ever */
        PyMem_Free(self->scratch);
        self->scratch = NULL;
        self->scratch_size = 0;
    }
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(at);
}

/* Places from a tuple of ints; -1 with an exception. */
static int
places(PyObject *tuple, int *into, int lowest, int highest)
{
    Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_GET_SIZE(tuple) : MAX_WIDTH + 1;
    for (Py_ssize_t i = 0; count <= MAX_WIDTH && i < count; i++) {
        long place = PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
        if (PyErr_Occurred())
            return -1;
        if (place < lowest || place >= highest)
            count = MAX_WIDTH + 1;
        else
            into[i] = (int)place;
    }
    if (count > MAX_WIDTH) {
        PyErr_SetString(PyExc_ValueError, "not a tuple of places");
        return -1;
    }
    return (int)count;
}

static int
Reader_init(Reader *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *event, *between, *slots, *topic_places, *values, *body;
    unsigned int oid;
    if (!PyArg_ParseTuple(args, "O!IO!O!iiiiiOUO!O!O!O!", &PyType_Type, &event, &oid, &PyTuple_Type, &between,
                          &PyTuple_Type, &slots, &self->width, &self->id, &self->row_headers, &self->key,
                          &self->otherwise, &self->names, &self->table, &PyDict_Type, &self->topics, &PyTuple_Type,
                          &topic_places, &PyTuple_Type, &values, &PyTuple_Type, &body)) {
        self->names = self->table = self->topics = NULL;
        return -1;
    }
    self->event = (PyTypeObject *)Py_NewRef(event);
    self->oid = oid;
    Py_INCREF(self->names);
    Py_INCREF(self->table);
    Py_INCREF(self->topics);
    int known[] = {self->id, self->row_headers, self->key, self->otherwise};
    for (int i = 0; i < 4; i++)
        if (known[i] < 0 || known[i] >= self->width || self->width > MAX_WIDTH) {
            PyErr_SetString(PyExc_ValueError, "a place outside of the row, or too wide a row");
            return -1;
        }
    if (!PyType_IsSubtype(self->event, &PyTuple_Type) || PyTuple_GET_SIZE(values) > MAX_WIDTH ||
        PyTuple_GET_SIZE(body) > MAX_WIDTH) {
        PyErr_SetString(PyExc_ValueError, "not an event type, or too many headers");
        return -1;
    }
    self->columns = places(slots, self->slots, -1, self->width);
    self->topic_count = self->columns < 0 ? -1 : places(topic_places, self->topic_places, 0, self->width);
    if (self->topic_count < 0)
        return -1;
    Py_ssize_t known_parts = PyTuple_GET_SIZE(between);
    if (known_parts && known_parts != self->columns + 1) {
        PyErr_SetString(PyExc_ValueError, "there is one value between two parts of a message");
        return -1;
    }
    for (Py_ssize_t i = 0; i < known_parts; i++) {
        PyObject *part = PyTuple_GET_ITEM(between, i);
        if (!PyBytes_Check(part)) {
            PyErr_SetString(PyExc_TypeError, "the parts of a message are bytes");
            return -1;
        }
        self->between[i] = Py_NewRef(part);
    }
    self->value_count = (int)PyTuple_GET_SIZE(values);
    for (int i = 0; i < self->value_count; i++) {
        PyObject *value = PyTuple_GET_ITEM(values, i);
        if (PyBytes_Check(value))
            self->constants[i] = Py_NewRef(value);
        else {
            long place = PyLong_AsLong(value);
            if (place < POSITION || place >= self->width) {
                PyErr_SetString(PyExc_ValueError, "a header without a place");
                return -1;
            }
            self->value_places[i] = (int)place;
        }
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(body); i++) {
        PyObject *literal;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(body, i), "Sii", &literal, &self->piece_places[i], &self->piece_kinds[i]))
            return -1;
        if (self->piece_places[i] < -1 || self->piece_places[i] >= self->width) {
            PyErr_SetString(PyExc_ValueError, "a piece of the body without a place");
            return -1;
        }
        self->literals[i] = Py_NewRef(literal);
        self->piece_count = (int)i + 1;
    }
    return 0;
}

static void
Reader_dealloc(Reader *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->event);
    Py_XDECREF(self->names);
    Py_XDECREF(self->table);
    Py_XDECREF(self->topics);
    for (int i = 0; i < MAX_WIDTH; i++) {
        Py_XDECREF(self->constants[i]);
        Py_XDECREF(self->literals[i]);
        Py_XDECREF(self->recent[i]);
    }
    for (int i = 0; i <= MAX_WIDTH; i++)
        Py_XDECREF(self->between[i]);
    PyMem_Free(self->scratch);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef reader_methods[] = {
    {"read", (PyCFunction)(void (*)(void))Reader_read, METH_FASTCALL, read_doc},
    {NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, "Reads the Inserts of one table."},
    {Py_tp_init, Reader_init},
    {Py_tp_dealloc, Reader_dealloc},
    {Py_tp_methods, reader_methods},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    .name = "relay._hot.Reader",
    .basicsize = sizeof(Reader),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = reader_slots,
};

/* --------------------------------------------------------------------------------------- transactions of pgoutput */

/* Of a Begin; new reference. NULL without an exception: declined. */
static PyObject *
make_transaction(PyTypeObject *type, const unsigned char *begin, PyObject *front)
{
    uint64_t lsn = read_uint64(begin + 1);
    int64_t microseconds = (int64_t)read_uint64(begin + 9);
    if (microseconds >= (INT64_C(1) << 53) || microseconds <= -(INT64_C(1) << 53))
        return NULL; /* Python divides such numbers exactly */
    char position[24];
    int length = PyOS_snprintf(position, sizeof position, "%X/%X:", (unsigned)(lsn >> 32), (unsigned)lsn);
    PyObject *stamp = joined(front, position, length);
    PyObject *xid = stamp ? PyLong_FromUnsignedLong(read_uint32(begin + 17)) : NULL;
    PyObject *commit_lsn = xid ? PyLong_FromUnsignedLongLong(lsn) : NULL;
    PyObject *time = commit_lsn ? PyFloat_FromDouble(PG_EPOCH + (double)microseconds / 1000000.0) : NULL;
    PyObject *made = time ? type->tp_alloc(type, TRANSACTION_FIELDS) : NULL;
    if (!made) {
        Py_XDECREF(stamp);
        Py_XDECREF(xid);
        Py_XDECREF(commit_lsn);
        Py_XDECREF(time);
        return NULL;
    }
    PyTuple_SET_ITEM(made, 0, xid);
    PyTuple_SET_ITEM(made, 1, commit_lsn);
    PyTuple_SET_ITEM(made, 2, time);
    PyTuple_SET_ITEM(made, 3, stamp);
    PyObject_GC_UnTrack(made); /* numbers and bytes: it is in no cycle */
    return made;
}

/* (commit LSN, xid, events) of a transaction that had some; -1 with an exception. */
static int
note_end(PyObject *ended, PyObject *transaction, long events)
{
    if (!events)
        return 0;
    PyObject *note = Py_BuildValue("(OOl)", PyTuple_GET_ITEM(transaction, 1), PyTuple_GET_ITEM(transaction, 0), events);
    int failed = note ? PyList_Append(ended, note) : -1;
    Py_XDECREF(note);
    return failed;
}

/* Borrowed reference; NULL: not a table that is read here. */
static Reader *
find_reader(PyObject *readers, PyTypeObject *type, const unsigned char *insert)
{
    PyObject *oid = PyLong_FromUnsignedLong(read_uint32(insert + 1));
    PyObject *reader = oid ? PyDict_GetItemWithError(readers, oid) : NULL;
    Py_XDECREF(oid);
    return reader && Py_IS_TYPE(reader, type) ? (Reader *)reader : NULL;
}

/* Of 64 bits; None of no message. */
static PyObject *
number_at(const unsigned char *message, int place)
{
    return message ? PyLong_FromUnsignedLongLong(read_uint64(message + place)) : Py_NewRef(Py_None);
}

PyDoc_STRVAR(walk_doc,
             "walk(messages, at, readers, Transaction, front, transaction, ordinal, events, ended)"
             " -> (at, transaction, ordinal, commit_lsn, end_lsn)\n\n"
             "Goes through Begins, Inserts and Commits of pgoutput from `at` on: appends events, and (commit LSN, xid,\n"
             "events) of transactions that ended. Returns where it stopped, the transaction that is open there, the\n"
             "newest Begin's LSN and the newest Commit's end, if there were any.");

static PyObject *
walk(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 9 || !PyList_Check(args[0]) || !PyDict_Check(args[2]) || !PyType_Check(args[3]) ||
        !PyType_IsSubtype((PyTypeObject *)args[3], &PyTuple_Type) || !PyBytes_Check(args[4]) ||
        (args[5] != Py_None && (!Py_IS_TYPE(args[5], (PyTypeObject *)args[3]) ||
                                PyTuple_GET_SIZE(args[5]) != TRANSACTION_FIELDS ||
                                !PyBytes_Check(PyTuple_GET_ITEM(args[5], 3)))) ||
        !PyList_Check(args[7]) || !PyList_Check(args[8])) {
        PyErr_SetString(PyExc_TypeError, "walk(list, int, dict, type, bytes, Transaction or None, int, list, list)");
        return NULL;
    }
    PyObject *messages = args[0];
    Py_ssize_t at = PyLong_AsSsize_t(args[1]);
    long ordinal = PyLong_AsLong(args[6]);
    if (PyErr_Occurred())
        return NULL;
    PyTypeObject *reader_type = *(PyTypeObject **)PyModule_GetState(module);
    PyObject *transaction = Py_NewRef(args[5]);
    Reader *reader = NULL; /* the last one */
    const unsigned char *begun = NULL, *ended = NULL; /* the newest ones */
    Cell cells[MAX_WIDTH];
    for (; at < PyList_GET_SIZE(messages); at++) {
        PyObject *message = PyList_GET_ITEM(messages, at);
        if (!PyBytes_Check(message) || PyBytes_GET_SIZE(message) <= XLOG_HEADER)
            break;
        const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(message), *body = data + XLOG_HEADER;
        Py_ssize_t size = PyBytes_GET_SIZE(message);
        if (data[0] != 'w' || (transaction == Py_None) != (body[0] == 'B'))
            break;
        if (body[0] == 'I' && size >= XLOG_HEADER + 8) {
            if (!reader || read_uint32(body + 1) != reader->oid)
                reader = find_reader(args[2], reader_type, body);
            if (!reader || !split(reader, data, size, cells) ||
                !append_event(reader, cells, transaction, PyTuple_GET_ITEM(transaction, 3), ordinal, args[7]))
                break;
            ordinal++;
        }
        else if (body[0] == 'B' && size == XLOG_HEADER + 21) {
            PyObject *made = make_transaction((PyTypeObject *)args[3], body, args[4]);
            if (!made)
                break;
            Py_SETREF(transaction, made);
            begun = body;
            ordinal = 0;
        }
        else if (body[0] == 'C' && size == XLOG_HEADER + 26) {
            if (note_end(args[8], transaction, ordinal))
                break;
            ended = body;
            Py_SETREF(transaction, Py_NewRef(Py_None));
        }
        else
            break;
    }
    if (PyErr_Occurred()) {
        Py_DECREF(transaction);
        return NULL;
    }
    return Py_BuildValue("(nNlNN)", at, transaction, ordinal, number_at(begun, 1), number_at(ended, 10));
}

/* ---------------------------------------------------------------------------------------------- frames for NATS */

#define PUT(source, length)                \
    do {                                   \
        memcpy(to, (source), (length));    \
        to += (length);                    \
    } while (0)

static const char VERSION[] = "NATS/1.0\r\nNats-Expected-Last-Sequence: ";
static const char MSG_ID[] = "Nats-Msg-Id: ";

static int
decimal(char *into, Py_ssize_t number)
{
    char reversed[24];
    int length = 0;
    do
        reversed[length++] = (char)('0' + number % 10);
    while (number /= 10);
    for (int i = 0; i < length; i++)
        into[i] = reversed[length - 1 - i];
    return length;
}

static int
has_line_break(PyObject *bytes)
{
    const unsigned char *at = (const unsigned char *)PyBytes_AS_STRING(bytes);
    for (const unsigned char *end = at + PyBytes_GET_SIZE(bytes); at < end; at++)
        if (*at <= 13 && (*at == 10 || *at == 13 || *at == 0))
            return 1;
    return 0;
}

/* Bytes of the header block; -1: declined. */
static Py_ssize_t
header_size(PyObject *event, PyObject *prefixes, int with_ids, Py_ssize_t sent)
{
    PyObject *id = PyTuple_GET_ITEM(event, 0), *values = PyTuple_GET_ITEM(event, 4);
    if (!PyBytes_Check(id) || !PyTuple_Check(values) || PyTuple_GET_SIZE(values) != PyTuple_GET_SIZE(prefixes))
        return -1;
    char digits[24];
    Py_ssize_t size = sizeof VERSION - 1 + decimal(digits, sent) + 2 + 2;
    if (with_ids) {
        if (has_line_break(id))
            return -1;
        size += sizeof MSG_ID - 1 + PyBytes_GET_SIZE(id) + 2;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++) {
        PyObject *value = PyTuple_GET_ITEM(values, i);
        if (!PyBytes_Check(value) || has_line_break(value))
            return -1;
        size += PyBytes_GET_SIZE(PyTuple_GET_ITEM(prefixes, i)) + PyBytes_GET_SIZE(value) + 2;
    }
    return size;
}

PyDoc_STRVAR(frames_doc,
             "frames(events, at, stop, names, prefixes, ways, chain, sent, reply, all_reply, with_ids, max_headers,"
             " max_payload) -> (at, bytes)\n\n"
             "Chained HPUB frames of the events from `at` up to `stop`, as long as they have these header names and go\n"
             "to this chain; all of them, or only the last, ask for a reply. Returns where it stopped, and the frames.");

static PyObject *
frames(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *events, *names, *prefixes, *ways, *chain, *reply;
    Py_ssize_t at, stop, sent, max_headers, max_payload;
    int all_reply, with_ids;
    if (!PyArg_ParseTuple(args, "O!nnOO!O!OnSppnn", &PyList_Type, &events, &at, &stop, &names, &PyTuple_Type, &prefixes,
                          &PyDict_Type, &ways, &chain, &sent, &reply, &all_reply, &with_ids, &max_headers, &max_payload))
        return NULL;
    if (at < 0 || stop > PyList_GET_SIZE(events))
        return PyErr_Format(PyExc_IndexError, "there are no such events");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(prefixes); i++)
        if (!PyBytes_Check(PyTuple_GET_ITEM(prefixes, i)))
            return PyErr_Format(PyExc_TypeError, "prefixes are bytes");
    /* First how many and how long, then one block of memory, then the bytes. */
    Py_ssize_t total = 0, end = at, first = sent;
    PyObject *topic = NULL, *route = NULL;
    char digits[24];
    for (; end < stop; end++, sent++) {
        PyObject *event = PyList_GET_ITEM(events, end);
        if (!PyTuple_Check(event) || PyTuple_GET_SIZE(event) != EVENT_FIELDS || PyTuple_GET_ITEM(event, 3) != names)
            break;
        if (PyTuple_GET_ITEM(event, 1) != topic) {
            topic = PyTuple_GET_ITEM(event, 1);
            PyObject *way = PyDict_GetItemWithError(ways, topic);
            if (!way || !PyTuple_Check(way) || PyTuple_GET_SIZE(way) != 2 || PyTuple_GET_ITEM(way, 1) != chain)
                break;
            route = PyTuple_GET_ITEM(way, 0);
        }
        PyObject *body = PyTuple_GET_ITEM(event, 5);
        if (!PyBytes_Check(route) || (body != Py_None && !PyBytes_Check(body)))
            break;
        Py_ssize_t size = header_size(event, prefixes, with_ids, sent);
        Py_ssize_t payload = size + (body == Py_None ? 0 : PyBytes_GET_SIZE(body));
        if (size < 0 || size > max_headers || payload > max_payload)
            break;
        total += PyBytes_GET_SIZE(route) + decimal(digits, size) + 1 + decimal(digits, payload) + 2 + payload + 2;
    }
    if (end > at)
        total += PyBytes_GET_SIZE(reply) * (all_reply ? end - at : 1);
    PyObject *blob = PyErr_Occurred() ? NULL : PyBytes_FromStringAndSize(NULL, total);
    if (!blob)
        return NULL;
    char *to = PyBytes_AS_STRING(blob);
    for (topic = NULL, sent = first; at < end; at++, sent++) {
        PyObject *event = PyList_GET_ITEM(events, at);
        PyObject *id = PyTuple_GET_ITEM(event, 0), *values = PyTuple_GET_ITEM(event, 4);
        PyObject *body = PyTuple_GET_ITEM(event, 5);
        if (PyTuple_GET_ITEM(event, 1) != topic) {
            topic = PyTuple_GET_ITEM(event, 1);
            route = PyTuple_GET_ITEM(PyDict_GetItemWithError(ways, topic), 0);
        }
        Py_ssize_t size = header_size(event, prefixes, with_ids, sent);
        Py_ssize_t length = body == Py_None ? 0 : PyBytes_GET_SIZE(body);
        PUT(PyBytes_AS_STRING(route), PyBytes_GET_SIZE(route));
        if (all_reply || at == end - 1)
            PUT(PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply));
        to += decimal(to, size);
        *to++ = ' ';
        to += decimal(to, size + length);
        PUT("\r\n", 2);
        PUT(VERSION, sizeof VERSION - 1);
        to += decimal(to, sent);
        PUT("\r\n", 2);
        if (with_ids) {
            PUT(MSG_ID, sizeof MSG_ID - 1);
            PUT(PyBytes_AS_STRING(id), PyBytes_GET_SIZE(id));
            PUT("\r\n", 2);
        }
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++) {
            PyObject *prefix = PyTuple_GET_ITEM(prefixes, i), *value = PyTuple_GET_ITEM(values, i);
            PUT(PyBytes_AS_STRING(prefix), PyBytes_GET_SIZE(prefix));
            PUT(PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value));
            PUT("\r\n", 2);
        }
        PUT("\r\n", 2);
        if (length)
            PUT(PyBytes_AS_STRING(body), length);
        PUT("\r\n", 2);
    }
    return Py_BuildValue("(nN)", end, blob);
}

static PyMethodDef functions[] = {
    {"frames", frames, METH_VARARGS, frames_doc},
    {"walk", (PyCFunction)(void (*)(void))walk, METH_FASTCALL, walk_doc},
    {NULL},
};

/* The module's state is the type of readers. */
static int
fill(PyObject *module)
{
    PyObject *reader = PyType_FromSpec(&reader_spec);
    *(PyObject **)PyModule_GetState(module) = reader;
    return reader ? PyModule_AddObjectRef(module, "Reader", reader) : -1;
}

static void
let_go(void *module)
{
    Py_CLEAR(*(PyObject **)PyModule_GetState((PyObject *)module));
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, fill},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "relay._hot",
    .m_doc = "The hot path in C; see _hot.c.",
    .m_size = sizeof(PyObject *),
    .m_methods = functions,
    .m_slots = module_slots,
    .m_free = let_go,
};

PyMODINIT_FUNC
PyInit__hot(void)
{
    return PyModuleDef_Init(&definition);
}
